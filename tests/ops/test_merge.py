"""Attention over segments, merged, is attention over all keys."""

from __future__ import annotations

import pytest
import torch

from precache.ops import AttentionOutput, cpu, merge_attention, reference
from tests.ops.cases import Case, segment

TUNING = cpu.Tuning("fused", 48, 100, torch.float32)


@pytest.mark.parametrize("cuts", [(0, 120, 310), (0, 309, 310), (0, 1, 250, 300, 310)])
@pytest.mark.parametrize("q_len", [1, 70])
@pytest.mark.parametrize("window", [None, 40])
def test_merged_segments_equal_one_pass(
    q_len: int, cuts: tuple[int, ...], window: int | None
) -> None:
    inputs = Case(q_len=q_len, kv_len=310, kv_start=7, key_rank=4, window=window).inputs()
    parts = [
        cpu.attend(segment(inputs, start, end), TUNING)
        for start, end in zip(cuts, cuts[1:], strict=False)
    ]
    merged, whole = merge_attention(parts), reference.attend(inputs)
    torch.testing.assert_close(merged.out, whole.out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(merged.lse, whole.lse, atol=1e-5, rtol=1e-5)
    plain_mean = torch.stack([part.out for part in parts]).mean(0)
    assert (merged.out - plain_mean).abs().max() > 0.01


def test_rows_without_any_key_stay_empty() -> None:
    inputs = Case(q_len=6, kv_len=20, kv_start=10, q_positions=7).inputs()
    merged = merge_attention(
        [cpu.attend(segment(inputs, start, end), TUNING) for start, end in ((0, 5), (5, 20))]
    )
    assert (merged.out[:, :3] == 0).all()
    assert (merged.lse[:, :3] == -torch.inf).all()
    torch.testing.assert_close(merged.out, reference.attend(inputs).out)


def test_one_part_is_returned_as_it_is() -> None:
    part = cpu.attend(Case().inputs())
    assert merge_attention([part]) is part


def test_merging_keeps_the_dtype_of_the_parts() -> None:
    out, lse = torch.ones(2, 3, 8, dtype=torch.bfloat16), torch.zeros(2, 3)
    merged = merge_attention([AttentionOutput(out, lse), AttentionOutput(3 * out, lse)])
    assert (merged.out.dtype, merged.lse.dtype) == (torch.bfloat16, torch.float32)
    assert (merged.out == 2).all()
