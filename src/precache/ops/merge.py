"""Joins attention over disjoint key segments into attention over all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from precache.ops.contract import AttentionContractError, AttentionOutput


def merge_attention(parts: Sequence[AttentionOutput]) -> AttentionOutput:
    """Weigh the parts of the same queries by the share of the softmax that each one holds."""
    _check_parts(parts)
    if len(parts) == 1:
        return parts[0]
    part_lse = torch.stack([part.lse for part in parts])  # [num_parts, num_heads, q_len]
    lse = torch.logsumexp(part_lse, dim=0)
    # A row that sees no key in any part has lse -inf; the clamp turns its weights into 0, not NaN.
    weights = torch.exp(part_lse - lse.clamp_min(torch.finfo(lse.dtype).min))
    out = torch.zeros_like(parts[0].out, dtype=lse.dtype)
    for part, weight in zip(parts, weights, strict=True):
        out.addcmul_(part.out.to(lse.dtype), weight.unsqueeze(-1))
    return AttentionOutput(out.to(parts[0].out.dtype), lse)


def _check_parts(parts: Sequence[AttentionOutput]) -> None:
    if not parts:
        raise AttentionContractError("parts", "an empty sequence", "1 part or more")
    first = parts[0].out
    for index, part in enumerate(parts):
        if part.out.shape != first.shape or part.lse.shape != first.shape[:2]:
            raise AttentionContractError(
                f"parts[{index}]",
                f"out {list(part.out.shape)}, lse {list(part.lse.shape)}",
                f"out {list(first.shape)}, lse {list(first.shape[:2])}, as in parts[0]",
            )
        if part.out.dtype != first.dtype:
            raise AttentionContractError(
                f"parts[{index}].out.dtype", part.out.dtype, f"{first.dtype}, as in parts[0]"
            )
