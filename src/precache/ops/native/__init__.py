"""Attention on a CPU by two C kernels; what they do not take is the blocked backend's.

Decode steps (decode.c): one query per sequence, keys, values and strips each read once and widened in registers, both
accumulators in one pass. Prefill (prefill.c): the low-rank parts are expanded a tile of keys at a time, and no score
leaves the first cache. Compiled when precache is installed, if there is a C compiler; without it the backend "cpu" does
the same in several torch calls.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TypeVar

import torch
from torch import Tensor

from precache.ops import cpu
from precache.ops.contract import AttentionInputs, AttentionOutput, BackendUnavailableError
from precache.ops.native.library import (
    DTYPES,
    LANES,
    MAX_GROUP,
    MAX_HEAD_DIM,
    MAX_KEY_RANK,
    MAX_RANK,
    DecodeCall,
    KeyStripCall,
    PrefillCall,
    load,
    run,
)
from precache.ops.paged import PagedInputs

__all__ = ["attend", "attend_paged", "fits", "obstacle"]

_INT32_MAX = 2**31 - 1
_FAR = 2**62  # beyond every position, and no overflow when one is added


def obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this backend cannot run, or None."""
    if device.type != "cpu":
        return f"it runs on CPUs, not on {device.type!r}"
    if dtype not in DTYPES:
        return f"it computes in {', '.join(map(str, DTYPES))}, not in {dtype}"
    return load()[1]


def fits(group: int, head_dim: int, rank: int, key_rank: int = 0) -> bool:
    """Whether the kernel takes these shapes; `group` is the number of query heads of a KV head."""
    small = group <= MAX_GROUP and head_dim <= MAX_HEAD_DIM and rank <= MAX_RANK
    step = 2 * LANES if key_rank else LANES  # the halves of a low-rank key are rotated
    return small and key_rank <= MAX_KEY_RANK and head_dim % step == 0


def attend(inputs: AttentionInputs) -> AttentionOutput:
    """Attention of one sequence; queries at listed positions are the blocked backend's."""
    num_heads, q_len, head_dim = inputs.q.shape
    group = num_heads // inputs.k.shape[0]
    key_rank = 0 if inputs.k_lora is None else inputs.k_lora.z.shape[1]
    takes = q_len == 1 or (_prefills() and isinstance(inputs.q_positions, int))
    if not takes or not fits(group, head_dim, _rank(inputs), key_rank):
        return cpu.attend(inputs)
    return _decode(inputs) if q_len == 1 else _prefill(inputs)


@functools.cache
def _prefills() -> bool:
    """With wider vectors, or products of 16-bit numbers, the BLAS may well be faster: it was not measured there."""
    return torch.backends.cpu.get_cpu_capability() == "AVX2"


def _decode(inputs: AttentionInputs) -> AttentionOutput:
    num_heads, num_kv_heads, kv_len = inputs.q.shape[0], *inputs.k.shape[:2]
    out = torch.empty_like(inputs.q, memory_format=torch.contiguous_format)
    lse = inputs.q.new_empty(num_heads, 1, dtype=torch.float32)
    last = int(inputs.q_positions) - inputs.kv_start
    end = min(max(last + 1, 0), kv_len)
    first = 0 if inputs.window is None else min(max(last + 1 - inputs.window, 0), end)
    bounds = (ctypes.c_int32 * 3)(first, end, 0)
    call = _fill(DecodeCall(), inputs, num_heads, num_kv_heads, out, lse)
    call.first = ctypes.addressof(bounds)
    call.end, call.slots = call.first + 4, call.first + 8
    call.num_seqs, call.block_size, call.max_blocks = 1, kv_len, 1
    call.k_dim = 1
    _fill_one_sequence(call, inputs, out)
    run(call)
    return AttentionOutput(out, lse)


def _prefill(inputs: AttentionInputs) -> AttentionOutput:
    num_heads, q_len, head_dim = inputs.q.shape
    num_kv_heads, kv_len, _ = inputs.k.shape
    # Heads next to head_dim in memory, so that the output projection reads it without a copy.
    out = inputs.q.new_empty(q_len, num_heads, head_dim).transpose(0, 1)
    lse = inputs.q.new_empty(num_heads, q_len, dtype=torch.float32)
    call = _fill(PrefillCall(), inputs, num_heads, num_kv_heads, out, lse)
    call.q_len, call.kv_len = q_len, kv_len
    call.position = int(inputs.q_positions) - inputs.kv_start
    call.window = min(inputs.window or 0, _FAR)
    call.q_row, call.out_row = inputs.q.stride(1), out.stride(1)
    _fill_one_sequence(call, inputs, out)
    run(call)
    return AttentionOutput(out, lse)


def attend_paged(inputs: PagedInputs, out: Tensor) -> AttentionOutput:
    """Attention of sequences with one query each over a paged cache; fills `out`.

    Raises BackendUnavailableError for more queries, or none, and for shapes that the kernel does not take.
    """
    num_seqs, num_heads, head_dim = inputs.q.shape
    page_size, num_kv_heads = inputs.k.shape[1:3]
    rank = 0 if inputs.strips is None else inputs.strips.z.shape[3]
    if inputs.max_q_len != 1 or inputs.kv_lens.shape[0] != num_seqs:
        raise BackendUnavailableError("native", "it decodes: one query a sequence")
    if not fits(num_heads // num_kv_heads, head_dim, rank):
        raise BackendUnavailableError(
            "native", f"{num_heads} heads of {head_dim} over {num_kv_heads}, rank {rank}"
        )
    if inputs.k.stride(-1) != 1 and page_size % LANES:
        raise BackendUnavailableError("native", f"keys by column in pages of {page_size}")
    lse = inputs.q.new_empty(num_seqs, num_heads, dtype=torch.float32)
    call = _fill(DecodeCall(), inputs, num_heads, num_kv_heads, out, lse)
    if inputs.window is not None:
        first = (inputs.kv_lens - min(inputs.window, _INT32_MAX)).clamp_(min=0)
        call.first = first.data_ptr()
    call.end = inputs.kv_lens.data_ptr()
    call.block_table = inputs.block_table.data_ptr()
    call.num_seqs, call.block_size = num_seqs, page_size
    call.max_blocks = inputs.block_table.stride(0)
    call.q_seq, call.q_head = inputs.q.stride()[:2]
    call.out_seq, call.out_head = out.stride()[:2]
    call.k_block, call.k_token, call.k_head, call.k_dim = inputs.k.stride()
    call.v_block, call.v_token, call.v_head = inputs.v_base.stride()[:3]
    if inputs.strips is not None:
        strips = inputs.strips
        call.z = strips.z.data_ptr()
        call.b = strips.b.data_ptr()
        call.slots = strips.adapter_index.data_ptr()
        call.rank, (call.z_block, call.z_token, call.z_slot) = rank, strips.z.stride()[:3]
        call.b_slot, call.b_head, call.b_rank = strips.b.stride()[:3]
    run(call)
    return AttentionOutput(out.transpose(0, 1), lse.transpose(0, 1))


def _rank(inputs: AttentionInputs) -> int:
    return 0 if inputs.v_lora is None else inputs.v_lora.z.shape[1]


def _fill_one_sequence(
    call: DecodeCall | PrefillCall, inputs: AttentionInputs, out: Tensor
) -> None:
    """Where the tensors of one sequence lie. They have to outlive the call."""
    call.q_head, call.out_head = inputs.q.stride(0), out.stride(0)
    call.k_head, call.k_token = inputs.k.stride()[:2]
    call.v_head, call.v_token = inputs.v_base.stride()[:2]
    if inputs.v_lora is not None:
        strip = inputs.v_lora
        call.z, call.b = strip.z.data_ptr(), strip.b.data_ptr()
        call.rank, call.z_token = _rank(inputs), strip.z.stride(0)
        call.b_head, call.b_rank = strip.b.stride()[:2]
    if inputs.k_lora is not None:
        keys = inputs.k_lora
        call.key = KeyStripCall(
            z=keys.z.data_ptr(),
            b=keys.b.data_ptr(),
            cos=keys.cos.data_ptr(),
            sin=keys.sin.data_ptr(),
            rank=keys.z.shape[1],
            z_token=keys.z.stride(0),
            b_head=keys.b.stride(0),
            b_rank=keys.b.stride(1),
            cos_token=keys.cos.stride(0),
            sin_token=keys.sin.stride(0),
        )


_C = TypeVar("_C", DecodeCall, PrefillCall)


def _fill(
    call: _C,
    inputs: AttentionInputs | PagedInputs,
    num_heads: int,
    num_kv_heads: int,
    out: Tensor,
    lse: Tensor,
) -> _C:
    """What all calls have in common. The tensors have to outlive the call."""
    call.q, call.k, call.v = inputs.q.data_ptr(), inputs.k.data_ptr(), inputs.v_base.data_ptr()
    call.out, call.lse = out.data_ptr(), lse.data_ptr()
    call.num_heads, call.num_kv_heads = num_heads, num_kv_heads
    call.head_dim = inputs.q.shape[-1]
    call.scale, call.softcap = inputs.scale, inputs.softcap or 0.0
    call.dtype, call.threads = DTYPES[inputs.q.dtype], torch.get_num_threads()
    return call
