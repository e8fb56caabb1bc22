"""LoRA on a CPU, grouped by adapter: one pair of GEMMs for all rows of an adapter, and none for rows without one.

Replaces vLLM's PunicaWrapperCPU, which copies the matrices of an adapter for every token, and which gives rows without
an adapter the delta of the last slot as soon as any other row of the batch has one (index -1 is read as "the last").
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


class RowGroup(NamedTuple):
    """The rows of a batch that belong to one adapter's slot."""

    slot: int
    rows: slice | Tensor  # int64 [num_rows] where they are not contiguous


class GroupedPunicaWrapper(PunicaWrapperCPU):
    """vLLM's interface over `group_rows`. Every result is added to `y` in place."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.token_groups: list[RowGroup] = []
        self.sampler_groups: list[RowGroup] = []

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        super().update_metadata(*args, **kwargs)
        self.token_groups = group_rows(self.token_lora_indices)
        self.sampler_groups = group_rows(self.sampler_indices)

    def add_lora_linear(
        self,
        y: Tensor,  # [num_rows, sum of output_slices]
        x: Tensor,  # [num_rows, in]
        lora_a_stacked: tuple[Tensor, ...],  # each [slots, 1, rank, in]
        lora_b_stacked: tuple[Tensor, ...],  # each [slots, 1, out, rank]
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: tuple[Tensor, ...] | None = None,
        **kwargs: Any,
    ) -> None:
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        start = 0
        for lora_a, lora_b, width in zip(
            lora_a_stacked, lora_b_stacked, output_slices, strict=True
        ):
            add_delta(self.token_groups, y[:, start : start + width], x, lora_a, lora_b, scale)
            start += width

    def add_lora_logits(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: Tensor,
        lora_b_stacked: Tensor,
        scale: float,
        *,
        buffer: Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        add_delta(self.sampler_groups, y, x, lora_a_stacked, lora_b_stacked, scale)

    def add_lora_embedding(
        self, y: Tensor, x: Tensor, lora_b_stacked: Tensor, add_inputs: bool = True, **kwargs: Any
    ) -> None:
        for slot, rows in self.token_groups:
            delta = x[rows].to(y.dtype) @ lora_b_stacked[slot, 0].to(y.dtype).T
            y[rows] = y[rows] + delta if add_inputs else delta


def group_rows(slots: Tensor) -> list[RowGroup]:
    """Group the rows of a batch by slot, -1 (no adapter) left out. `slots` is int64 [num_rows]."""
    if not slots.numel():
        return []
    values, counts = torch.unique_consecutive(slots, return_counts=True)
    ends = counts.cumsum(0).tolist()
    runs: dict[int, list[slice]] = {}
    for slot, count, end in zip(values.tolist(), counts.tolist(), ends, strict=True):
        if slot >= 0:
            runs.setdefault(slot, []).append(slice(end - count, end))
    return [
        RowGroup(slot, found[0] if len(found) == 1 else (slots == slot).nonzero().flatten())
        for slot, found in runs.items()
    ]


def add_delta(
    groups: list[RowGroup], y: Tensor, x: Tensor, lora_a: Tensor, lora_b: Tensor, scale: float
) -> None:
    """y[rows] += scale (x[rows] A^T) B^T for every group; A is [slots, 1, rank, in], B [slots, 1, out, rank].

    B may be narrower than y, where a layer's output is padded.
    """
    for slot, rows in groups:
        delta = (x[rows].to(lora_a.dtype) @ lora_a[slot, 0].T) @ lora_b[slot, 0].T
        target = y[:, : delta.shape[-1]]
        target[rows] += delta.to(y.dtype) if scale == 1.0 else (delta * scale).to(y.dtype)
