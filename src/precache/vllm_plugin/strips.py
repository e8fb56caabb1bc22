"""The LR cache of one layer: X A of every adapter slot, in the tail of each page of vLLM's KV cache.

A page holds keys and values of a block and, behind them, the block's strip rows: `[block_size, width]`, of which the
first `num_slots * lora_rank` columns are used, slot after slot. The tail is part of the page, so it is allocated,
accounted for, reused and dropped with the block. Every attention backend stores and reads strips through this module.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class StripMoves:
    """Strip rows that are copied, within the columns of one slot, after a step has written its own.

    The neutral pass over tokens that an adapter wrote computes every adapter's strip; the writer's own strip then comes
    from the writer's pass.
    """

    slot: int
    src: Tensor  # int64 [num_rows], cache slots of the adapted pass
    dst: Tensor  # int64 [num_rows], cache slots of the neutral pass


class StripRows(NamedTuple):
    """Where the rows of a step are stored; the same in every layer."""

    rows: slice | Tensor  # of the step, those that are no padding
    blocks: Tensor  # int64, of each such row
    offsets: Tensor  # int64, within its block


@dataclass
class StripStep:
    """The running step, as far as it is the same in all layers of a worker, which share this object."""

    moves: list[StripMoves] = field(default_factory=list)
    where: StripRows | None = None  # set by the first layer that stores


def strip_width(num_slots: int, lora_rank: int, head_dim: int) -> int:
    """Columns of a strip row. A narrow row is padded to head_dim, so that attention can read it as a value head."""
    return max(num_slots * lora_rank, head_dim)


def widen_spec(spec: Any, num_slots: int, lora_rank: int) -> Any:
    """The KV cache spec of a layer with room for the strips behind each page."""
    from dataclasses import replace

    width = strip_width(num_slots, lora_rank, spec.head_size)
    tail_bytes: int = spec.block_size * width * spec.dtype.itemsize
    return replace(spec, page_size_padded=spec.unpadded_page_size_bytes + tail_bytes)


def strip_bytes(spec: Any) -> int:
    """Bytes of a page that hold strips; 0 for a page without."""
    padded = spec.page_size_padded
    return 0 if padded is None else int(padded - spec.unpadded_page_size_bytes)


def strip_view(kv_cache: Tensor, width: int) -> Tensor:
    """The strip rows of all blocks, `[num_blocks, block_size, width]`, as a view of a layer's padded cache.

    `kv_cache` is vLLM's `[num_blocks, num_kv_heads, block_size, 2 * head_dim]` with blocks outermost.
    """
    num_blocks, num_heads, block_size, content = kv_cache.shape
    start = kv_cache.storage_offset() + num_heads * block_size * content
    shape, strides = (num_blocks, block_size, width), (kv_cache.stride(0), width, 1)
    return torch.as_strided(kv_cache, shape, strides, start)


def strip_rows(slot_mapping: Tensor, block_size: int) -> StripRows:
    """Read vLLM's cache slots `[num_rows]`; a negative one marks padding."""
    kept = slot_mapping >= 0
    rows: slice | Tensor = slice(len(slot_mapping))
    if not bool(kept.all()):
        rows, slot_mapping = kept.nonzero().flatten(), slot_mapping[kept]
    return StripRows(rows, slot_mapping // block_size, slot_mapping % block_size)


def write_strips(view: Tensor, z: Tensor, where: StripRows) -> None:
    """Store `z [num_rows, used columns]`, the strips of a step's rows."""
    view[where.blocks, where.offsets, : z.shape[1]] = z[where.rows].to(view.dtype)


def move_strips(view: Tensor, moves: StripMoves, lora_rank: int) -> None:
    """Copy the columns of one slot from rows to rows."""
    block_size = view.shape[1]
    columns = slice(moves.slot * lora_rank, (moves.slot + 1) * lora_rank)
    rows = view[moves.src // block_size, moves.src % block_size, columns]
    view[moves.dst // block_size, moves.dst % block_size, columns] = rows
