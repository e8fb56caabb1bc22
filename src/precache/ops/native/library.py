"""The compiled kernels as ctypes sees them: the structs of the C files, field by field."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from precache.ops.native.build import LIBRARY, source_id

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# As in common.h.
MAX_GROUP, MAX_HEAD_DIM, MAX_RANK, MAX_KEY_RANK, LANES = 16, 256, 256, 64, 8


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class KeyStripCall(ctypes.Structure):
    """Keys' low-rank part, in both calls; common.h says what it means."""

    _fields_ = [
        *_fields(ctypes.c_void_p, "z b cos sin"),
        *_fields(ctypes.c_int64, "rank z_token b_head b_rank cos_token sin_token"),
    ]


class DecodeCall(ctypes.Structure):
    """The arguments of one decode step; decode.c says what they mean."""

    _fields_ = [
        *_fields(ctypes.c_void_p, "q k v z b out lse block_table first end slots"),
        ("key", KeyStripCall),
        *_fields(ctypes.c_int64, "num_seqs num_heads num_kv_heads head_dim rank"),
        *_fields(ctypes.c_int64, "block_size max_blocks q_seq q_head out_seq out_head"),
        *_fields(ctypes.c_int64, "k_block k_head k_token k_dim v_block v_head v_token"),
        *_fields(ctypes.c_int64, "z_block z_token z_slot b_slot b_head b_rank"),
        *_fields(ctypes.c_float, "scale softcap"),
        *_fields(ctypes.c_int32, "dtype threads"),
    ]


class PrefillCall(ctypes.Structure):
    """The arguments of one prefill; prefill.c says what they mean."""

    _fields_ = [
        *_fields(ctypes.c_void_p, "q k v z b out lse"),
        ("key", KeyStripCall),
        *_fields(ctypes.c_int64, "num_heads num_kv_heads q_len kv_len head_dim rank position"),
        *_fields(ctypes.c_int64, "window q_head q_row out_head out_row k_head k_token"),
        *_fields(ctypes.c_int64, "v_head v_token z_token b_head b_rank"),
        *_fields(ctypes.c_float, "scale softcap"),
        *_fields(ctypes.c_int32, "dtype threads"),
    ]


Call = DecodeCall | PrefillCall
_FUNCTIONS: dict[type[Call], str] = {
    DecodeCall: "precache_decode",
    PrefillCall: "precache_prefill",
}


@functools.cache
def load() -> tuple[dict[type[Call], Any], str | None]:
    """The functions, or none and why. torch is loaded by now, and so is the OpenMP runtime it brought."""
    if not LIBRARY.is_file():
        return {}, "it was not compiled: python -m precache.ops.native does it, with cc"
    try:
        library = ctypes.CDLL(str(LIBRARY))
        built_from = library.precache_source_id
        functions = {call: getattr(library, name) for call, name in _FUNCTIONS.items()}
    except (OSError, AttributeError) as error:
        return {}, f"{LIBRARY} cannot be loaded ({error}): python -m precache.ops.native"
    built_from.restype = ctypes.c_uint64
    if built_from() != source_id():
        return {}, f"{LIBRARY} is of another version: python -m precache.ops.native"
    for call, function in functions.items():
        function.argtypes, function.restype = [ctypes.POINTER(call)], ctypes.c_int
    return functions, None


def run(call: Call) -> None:
    """Run a kernel on tensors that the caller keeps alive. Raises MemoryError."""
    functions, reason = load()
    assert functions, reason
    status = functions[type(call)](call)
    if status == 2:
        raise MemoryError("attention: no memory for partial sums")
    assert status == 0, "a shape that `fits` should have refused"
