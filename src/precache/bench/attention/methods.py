"""What is timed: our backends on the shared cache, and torch's attention on an adapter's own values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from precache.bench.attention.points import Problem
from precache.ops import lora_attention

SDPA = "sdpa"
SDPA_EXPAND = "sdpa+expand"
Method = Callable[[], Tensor]


def make_method(name: str, problem: Problem) -> Method:
    """The call to time, which returns [num_heads, q_len, head_dim]; what it may prepare beforehand is done here."""
    inputs = problem.inputs
    if name not in (SDPA, SDPA_EXPAND):
        call = inputs._asdict()
        return lambda: lora_attention(**call, backend=name).out
    q, k, v = (tensor.unsqueeze(0) for tensor in (inputs.q, inputs.k, problem.values))
    mask = _mask(inputs.q, inputs.k)

    def attend(values: Tensor) -> Tensor:
        return scaled_dot_product_attention(
            q, k, values, attn_mask=mask, scale=inputs.scale, enable_gqa=True
        )[0]

    if name == SDPA:
        return lambda: attend(v)
    strip = inputs.v_lora
    assert strip is not None
    return lambda: attend((inputs.v_base + strip.z @ strip.b).unsqueeze(0))


def _mask(q: Tensor, k: Tensor) -> Tensor | None:
    """A decode step needs none; on a GPU torch takes FlashAttention for this form of mask."""
    q_len, kv_len = q.shape[1], k.shape[1]
    if q_len == 1:
        return None
    if q.device.type == "cuda":
        return causal_lower_right(q_len, kv_len)
    positions = torch.arange(kv_len - q_len, kv_len)
    return positions[:, None] >= torch.arange(kv_len)
