"""How the requests of one step are split for attention on a CPU. Made once a step, used by every layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

MAX_SCRATCH_BLOCKS = 2048


@dataclass
class Part:
    """Some requests of a batch, attended to in one call."""

    rows: slice | Tensor  # of the batch: their query rows
    query_start_loc: Tensor  # int32 [num_requests + 1], within the part
    seq_lens: Tensor  # int32 [num_requests]
    block_table: Tensor  # int32 [num_requests, max blocks]
    slots: Tensor  # int32 [num_requests], -1 without an adapter
    # Which of the part's requests read a slot; all of them where there is one slot only.
    requests_of: list[tuple[int, slice | Tensor]] = field(default_factory=list)
    # How the operator divides its work, by (num_heads, num_kv_heads); the same for every layer.
    schedules: dict[tuple[int, int], Tensor] = field(default_factory=dict)


@dataclass
class Scratch:
    """The distinct (slot, block) pairs of a part; its block table points into them."""

    part: Part
    blocks: Tensor  # int64 [num_pairs]
    slots: Tensor  # int64 [num_pairs]
    pairs_of: list[tuple[int, slice | Tensor]]


@dataclass
class Plan:
    """Requests without an adapter read values as they lie; decoding ones read them and their strips; for all others the
    values are expanded into scratch pages."""

    base: Part | None
    decode: Part | None
    expanded: list[Scratch]


def make_plan(
    query_start_loc: Tensor,  # int32 [num_requests + 1]
    seq_lens: Tensor,
    block_table: Tensor,
    request_slots: Tensor,  # int64 [num_requests]
    block_size: int,
    decode_apart: bool,
) -> Plan:
    """Split a batch."""
    lengths = query_start_loc[1:] - query_start_loc[:-1]
    has_adapter = request_slots >= 0
    decodes = has_adapter & (lengths == 1) & decode_apart

    def part(requests: Tensor) -> Part:
        return _select(query_start_loc, seq_lens, block_table, request_slots, requests)

    expanded = (has_adapter & ~decodes).nonzero().flatten()
    num_blocks = (seq_lens + block_size - 1) // block_size
    groups = _bounded_groups(expanded, num_blocks[expanded].tolist())
    return Plan(
        base=part((~has_adapter).nonzero().flatten()) if not has_adapter.all() else None,
        decode=part(decodes.nonzero().flatten()) if decodes.any() else None,
        expanded=[_scratch(part(group), block_size) for group in groups],
    )


def _select(
    query_start_loc: Tensor, seq_lens: Tensor, block_table: Tensor, slots: Tensor, requests: Tensor
) -> Part:
    """The part of a batch that holds some of its requests, in order."""
    starts, ends = query_start_loc[requests].tolist(), query_start_loc[requests + 1].tolist()
    lengths = torch.tensor([0, *(end - start for start, end in zip(starts, ends, strict=True))])
    contiguous = all(end == start for end, start in zip(ends, starts[1:], strict=False))
    rows: slice | Tensor = slice(starts[0], ends[-1])
    if not contiguous:
        rows = torch.cat(
            [torch.arange(start, end) for start, end in zip(starts, ends, strict=True)]
        )
    slots = slots[requests].to(torch.int32)
    return Part(
        rows=rows,
        query_start_loc=lengths.cumsum(0).to(torch.int32),
        seq_lens=seq_lens[requests].contiguous(),
        block_table=block_table[requests].contiguous(),
        slots=slots,
        requests_of=_by_slot(slots),
    )


def _by_slot(slots: Tensor) -> list[tuple[int, slice | Tensor]]:
    present = sorted(set(slots.tolist()))
    if len(present) == 1:
        return [(present[0], slice(None))]
    return [(slot, (slots == slot).nonzero().flatten()) for slot in present]


def _bounded_groups(requests: Tensor, num_blocks: Sequence[int]) -> Iterator[Tensor]:
    """Consecutive requests whose pages fit into the scratch together; a longer one alone."""
    start, held = 0, 0
    for index, count in enumerate(num_blocks):
        if index > start and held + count > MAX_SCRATCH_BLOCKS:
            yield requests[start:index]
            start, held = index, 0
        held += count
    if start < len(num_blocks):
        yield requests[start:]


def _scratch(part: Part, block_size: int) -> Scratch:
    """Replace a part's block table by one over its distinct (slot, block) pairs."""
    counts = (part.seq_lens.to(torch.int64) + block_size - 1) // block_size
    used = torch.arange(part.block_table.shape[1])[None, :] < counts[:, None]
    blocks = part.block_table.to(torch.int64)[used]
    slots = part.slots.to(torch.int64)[:, None].expand_as(used)[used]
    span = int(blocks.max()) + 1
    pairs, index = torch.unique(slots * span + blocks, return_inverse=True)
    table = torch.zeros_like(part.block_table)
    table[used] = index.to(table.dtype)
    part.block_table = table
    slots = pairs // span
    return Scratch(part, pairs % span, slots, _by_slot(slots))
