"""Torch's fused attention kernel for the CPU, which also returns the log-sum-exp.

`scaled_dot_product_attention` runs the same kernel, but copies grouped keys once per query head and
keeps the log-sum-exp to itself.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_KERNEL: Callable[..., tuple[Tensor, Tensor]] | None = getattr(
    torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None
)


def has_fused_kernel(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel exists, and is the fast way to multiply in this dtype."""
    return _KERNEL is not None and device.type == "cpu" and dtype in (torch.float32, torch.float64)


def fused_attention(
    q: Tensor,  # [num_kv_heads, group, num_queries, head_dim]
    k: Tensor,  # [num_kv_heads, num_keys, head_dim]
    v: Tensor,  # [num_kv_heads, num_keys, head_dim]
    scale: float,
    is_causal: bool = False,  # query i sees keys 0 to i
) -> tuple[Tensor, Tensor]:
    """The attention output, shaped like q, and its log-sum-exp [num_kv_heads, group, num_queries].

    Their memory has queries before heads.
    """
    assert _KERNEL is not None
    k, v = k.unsqueeze(1), v.unsqueeze(1)
    if q.shape[1] > 1:
        k, v = k.expand(-1, q.shape[1], -1, -1), v.expand(-1, q.shape[1], -1, -1)
    return _KERNEL(q, k, v, is_causal=is_causal, scale=scale)
