"""One query over all the keys it sees, at once: the decode step of the CPU backend.

The same sums as the blocked form in a third of the torch calls. At short contexts the calls, not
the numbers, are what a decode step waits for, once in every layer of the model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from precache.ops.contract import AttentionInputs, AttentionOutput
from precache.ops.fused import fused_attention, has_fused_kernel
from precache.ops.numerics import accumulator_dtype, cap_scores, cast, product_dtype, weigh

_FEW_ROWS = 8
_WIDE_HEAD = 128


def is_decode_step(inputs: AttentionInputs) -> bool:
    """Whether `attend_one` can take the call: one query, and keys that can be used as stored."""
    q = inputs.q
    return q.shape[1] == 1 and inputs.k_lora is None and product_dtype(q) == q.dtype


def attend_one(inputs: AttentionInputs) -> AttentionOutput:
    """Attention of a single query; values stay low-rank, `b` is applied to the weighted z."""
    num_heads, _, head_dim = inputs.q.shape
    q = inputs.q.reshape(inputs.k.shape[0], -1, head_dim)  # [num_kv_heads, group, head_dim]
    k, v, z = _visible(inputs)
    if k.shape[1] == 0:
        return _nothing_seen(inputs)
    if inputs.v_lora is None and inputs.softcap is None and has_fused_kernel(q.dtype, q.device):
        out, lse = fused_attention(q.unsqueeze(1), k, v, inputs.scale)
        return AttentionOutput(out.view(num_heads, 1, head_dim), lse.view(num_heads, 1))
    scores = cap_scores(_scores(q, k, inputs.scale), inputs.softcap)
    maximum = scores.amax(-1, keepdim=True)
    probs = scores.sub_(maximum).exp_()
    total = probs.sum(-1, keepdim=True)
    out = weigh(probs, v)
    if inputs.v_lora is not None and z is not None:
        out.baddbmm_(weigh(probs, z), cast(inputs.v_lora.b, out.dtype))
    out = cast(out.div_(total), inputs.q.dtype).view(num_heads, 1, head_dim)
    return AttentionOutput(out, total.log_().add_(maximum).view(num_heads, 1))


def _visible(inputs: AttentionInputs) -> tuple[Tensor, Tensor, Tensor | None]:
    """k, v and z of the keys that the query sees; the cache itself if it sees all of them."""
    kv_len = inputs.k.shape[1]
    z = None if inputs.v_lora is None else inputs.v_lora.z
    end = int(inputs.q_positions) - inputs.kv_start + 1
    start = 0 if inputs.window is None else max(end - inputs.window, 0)
    end = min(max(end, start), kv_len)
    if start == 0 and end == kv_len:
        return inputs.k, inputs.v_base, z
    return inputs.k[:, start:end], inputs.v_base[:, start:end], None if z is None else z[start:end]


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """q k^T * scale, [num_kv_heads, group, num_keys], in the accumulator's dtype."""
    if q.shape[1] <= _FEW_ROWS and q.shape[2] >= _WIDE_HEAD:
        # Twice as fast as q k^T there, for the BLAS of an AVX2 machine, even with the reordering.
        scores = torch.bmm(k, q.transpose(1, 2)).transpose(1, 2).contiguous()
        return cast(scores, accumulator_dtype(q)).mul_(scale)
    # Half-precision products round the scores, as the eager attention of transformers does.
    unused = q.new_empty(1, 1, 1)
    scores = torch.baddbmm(unused, q, k.transpose(1, 2), beta=0, alpha=scale)
    return cast(scores, accumulator_dtype(q))


def _nothing_seen(inputs: AttentionInputs) -> AttentionOutput:
    lse = inputs.q.new_full(inputs.q.shape[:2], -torch.inf, dtype=accumulator_dtype(inputs.q))
    return AttentionOutput(torch.zeros_like(inputs.q), lse)
