"""The compiled kernel as ctypes sees it: `struct decode_call` of decode.c, field by field."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from precache.ops.native.build import LIBRARY, source_id

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MAX_GROUP, MAX_HEAD_DIM, MAX_RANK, MAX_KEY_RANK, LANES = 16, 256, 256, 64, 8  # as in decode.c

_POINTERS = "q k v z b out lse block_table first end slots key_z key_b cos sin"
_SIZES = "num_seqs num_heads num_kv_heads head_dim rank key_rank block_size max_blocks"
_STRIDES = (
    "q_seq q_head out_seq out_head k_block k_head k_token k_dim v_block v_head v_token "
    "z_block z_token z_slot b_slot b_head b_rank "
    "key_z_token key_b_head key_b_rank cos_token sin_token"
)


class DecodeCall(ctypes.Structure):
    """The arguments of one call; decode.c says what they mean."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS.split()),
        *((name, ctypes.c_int64) for name in f"{_SIZES} {_STRIDES}".split()),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("dtype", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    ]


@functools.cache
def load() -> tuple[Any, str | None]:
    """The function, or None and why there is none. torch is loaded by now, and so is the OpenMP runtime it brought."""
    if not LIBRARY.is_file():
        return None, "it was not compiled: python -m precache.ops.native does it, with cc"
    try:
        library = ctypes.CDLL(str(LIBRARY))
        built_from, decode = library.precache_source_id, library.precache_decode
    except (OSError, AttributeError) as error:
        return None, f"{LIBRARY} cannot be loaded ({error}): python -m precache.ops.native"
    built_from.restype = ctypes.c_uint64
    if built_from() != source_id():
        return None, f"{LIBRARY} is of another version: python -m precache.ops.native"
    decode.argtypes, decode.restype = [ctypes.POINTER(DecodeCall)], ctypes.c_int
    return decode, None


def run(call: DecodeCall) -> None:
    """Run the kernel on tensors that the caller keeps alive. Raises MemoryError."""
    decode, reason = load()
    assert decode is not None, reason
    status = decode(call)
    if status == 2:
        raise MemoryError("attention: no memory for the partial sums of a decode step")
    assert status == 0, "a shape that `fits` should have refused"
