"""The definition of correct: every formula written out, in float32 (float64 for float64 inputs).

It materialises all that the other backends avoid, and shares no code with them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from precache.ops.contract import AttentionInputs, AttentionOutput, KeyStrip


def attend(inputs: AttentionInputs) -> AttentionOutput:
    """Attention as in the paper's formula, one full score matrix per head."""
    num_heads, q_len, _ = inputs.q.shape
    group = num_heads // inputs.k.shape[0]
    k = _precise(inputs.k)
    if inputs.k_lora is not None:
        k = k + _rotated_keys(inputs.k_lora)
    v = _precise(inputs.v_base)
    if inputs.v_lora is not None:
        v = v + _precise(inputs.v_lora.z) @ _precise(inputs.v_lora.b)
    k = k.repeat_interleave(group, dim=0)  # [num_heads, kv_len, head_dim]
    v = v.repeat_interleave(group, dim=0)

    scores = _precise(inputs.q) @ k.transpose(1, 2) * inputs.scale  # [num_heads, q_len, kv_len]
    if inputs.softcap is not None:
        scores = torch.tanh(scores / inputs.softcap) * inputs.softcap
    scores = scores.masked_fill(~_visible(inputs), -torch.inf)

    lse = torch.logsumexp(scores, dim=-1)  # [num_heads, q_len]
    probs = torch.exp(scores - lse.unsqueeze(-1))
    probs = torch.where(lse.unsqueeze(-1) == -torch.inf, 0.0, probs)
    return AttentionOutput((probs @ v).to(inputs.q.dtype), lse)


def _precise(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _rotated_keys(strip: KeyStrip) -> Tensor:
    x = _precise(strip.z) @ _precise(strip.b)  # [num_kv_heads, kv_len, head_dim]
    first, second = x.chunk(2, dim=-1)
    rotated_half = torch.cat([-second, first], dim=-1)
    return x * _precise(strip.cos) + rotated_half * _precise(strip.sin)


def _visible(inputs: AttentionInputs) -> Tensor:
    """Which query may look at which key, [q_len, kv_len]."""
    device = inputs.q.device
    if isinstance(inputs.q_positions, int):
        queries = inputs.q_positions + torch.arange(inputs.q.shape[1], device=device)
    else:
        queries = inputs.q_positions.to(device)
    keys = inputs.kv_start + torch.arange(inputs.k.shape[1], device=device)
    distance = queries.unsqueeze(1) - keys
    visible = distance >= 0
    return visible if inputs.window is None else visible & (distance < inputs.window)
