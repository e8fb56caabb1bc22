"""Triton backend of `lora_attention`: NVIDIA and AMD GPUs, and a CPU under Triton's interpreter.

One kernel serves prefill and decoding, one buffer and pages; see `kernels`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from precache.ops.contract import AttentionInputs, AttentionOutput
from precache.ops.paged import PagedInputs
from precache.ops.triton.kernels import attend_kernel
from precache.ops.triton.launch import Call, Pages, run
from precache.ops.triton.tiles import Tiles

__all__ = ["Tiles", "attend", "attend_paged", "obstacle"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_OLDEST_GPU = (8, 0)  # compute capability


def obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this backend cannot run, or None."""
    if dtype not in _DTYPES:
        return f"it computes in {', '.join(map(str, _DTYPES))}, not in {dtype}"
    if isinstance(attend_kernel, InterpretedFunction):
        return None
    if device.type != "cuda":
        return f"it needs a GPU, not {device.type!r} (or TRITON_INTERPRET=1, to test it on a CPU)"
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and capability < _OLDEST_GPU:
        return f"it needs compute capability {_OLDEST_GPU} or newer, this GPU has {capability}"
    return None


def attend(inputs: AttentionInputs, tiles: Tiles | None = None) -> AttentionOutput:
    """Attention of one sequence whose keys lie in one buffer."""
    num_heads, q_len, head_dim = inputs.q.shape
    # Heads next to head_dim in memory, so that the output projection reads it without a copy.
    out = inputs.q.new_empty(q_len, num_heads, head_dim)
    v_lora = inputs.v_lora
    call = Call(
        q=inputs.q.transpose(0, 1),
        k=inputs.k.transpose(0, 1).unsqueeze(0),
        v_base=inputs.v_base.transpose(0, 1).unsqueeze(0),
        z=None if v_lora is None else v_lora.z[None, :, None],
        b=None if v_lora is None else v_lora.b.unsqueeze(0),
        scale=inputs.scale,
        max_q_len=q_len,
        max_kv_len=inputs.k.shape[1],
        first_position=_relative(inputs),
        window=inputs.window,
        softcap=inputs.softcap,
        k_lora=inputs.k_lora,
    )
    return run(call, tiles, out)


def _relative(inputs: AttentionInputs) -> int | Tensor:
    """Positions counted from the first key."""
    relative = inputs.q_positions - inputs.kv_start
    if isinstance(relative, int):
        return relative
    return relative.to(inputs.q.device, torch.int32)


def attend_paged(inputs: PagedInputs, out: Tensor, tiles: Tiles | None = None) -> AttentionOutput:
    """Attention of many sequences over a paged cache; fills `out` [num_tokens, num_heads, head_dim]."""
    strips = inputs.strips
    adapters = None if strips is None else strips.adapter_index
    call = Call(
        q=inputs.q,
        k=inputs.k,
        v_base=inputs.v_base,
        z=None if strips is None else strips.z,
        b=None if strips is None else strips.b,
        scale=inputs.scale,
        max_q_len=inputs.max_q_len,
        max_kv_len=inputs.max_kv_len,
        window=inputs.window,
        softcap=inputs.softcap,
        pages=Pages(inputs.block_table, inputs.query_start, inputs.kv_lens, adapters),
    )
    return run(call, tiles, out)
