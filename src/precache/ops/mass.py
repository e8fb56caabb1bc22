"""How much a few queries look at every key: what some methods choose tokens by. Not part of any attention result."""

from __future__ import annotations

import torch
from torch import Tensor

from precache.ops.numerics import cap_scores


def attention_mass(
    q: Tensor,  # [num_heads, q_len, head_dim], after RoPE
    k: Tensor,  # [num_kv_heads, kv_len, head_dim], after RoPE; key i sits at position i
    q_positions: Tensor,  # [q_len] int64
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention probabilities summed over queries and heads, [kv_len] float32; they sum to num_heads * q_len."""
    num_heads, q_len, head_dim = q.shape
    grouped = q.float().reshape(k.shape[0], num_heads // k.shape[0], q_len, head_dim)
    scores = torch.einsum("hgqd,hkd->hgqk", grouped, k.float()) * scale
    scores = cap_scores(scores, softcap)
    distance = q_positions.to(q.device).unsqueeze(1) - torch.arange(k.shape[1], device=q.device)
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    return scores.masked_fill(~visible, -torch.inf).softmax(-1).sum(dim=(0, 1, 2))
