"""The cached state of one trajectory: its token ids, who wrote them, and the buffers of k, v_base and the strips.

Rows below ``length`` are valid, rows above are free space that a running pass may fill before it commits them. Nothing
here knows a policy: the engine decides who writes what.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from precache.cache.layout import CacheLayout, StripLayout

TokenArray = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Writer:
    """Who wrote a token: the agent's name and the digest of the weights it had then ("" for the base model)."""

    name: str
    digest: str


@dataclass(frozen=True)
class WriterRun:
    """Consecutive tokens ``start`` to ``end`` (exclusive) of one writer."""

    start: int
    end: int
    writer: Writer


class KvBuffers:
    """k and v of all layers for a run of positions, each [num_kv_heads, capacity, head_dim]."""

    def __init__(self, layout: CacheLayout, start: int = 0) -> None:
        self.layout = layout
        self.start = start  # position of the first row
        self.capacity = 0
        self.k = [self._empty(0) for _ in range(layout.num_layers)]
        self.v = [self._empty(0) for _ in range(layout.num_layers)]

    def _empty(self, capacity: int) -> Tensor:
        layout = self.layout
        shape = (layout.num_kv_heads, capacity, layout.head_dim)
        return torch.empty(shape, dtype=layout.dtype, device=layout.device)

    def write(self, layer: int, positions: slice | Tensor, k: Tensor, v: Tensor) -> None:
        """Store k and v [num_kv_heads, n, head_dim] of ``positions``, a slice or int64 [n]."""
        if isinstance(positions, slice):
            rows: slice | Tensor = slice(positions.start - self.start, positions.stop - self.start)
        else:
            rows = (positions - self.start).to(k.device)
        self.k[layer][:, rows] = k
        self.v[layer][:, rows] = v

    def read(self, layer: int, end: int) -> tuple[Tensor, Tensor]:
        """Views of k and v [num_kv_heads, end - start, head_dim] up to position ``end`` (exclusive)."""
        rows = end - self.start
        return self.k[layer][:, :rows], self.v[layer][:, :rows]

    def grow(self, capacity: int, keep_rows: int) -> None:
        """Reallocate to ``capacity`` rows, one tensor at a time, keeping the first ``keep_rows``."""
        for tensors in (self.k, self.v):
            for layer, old in enumerate(tensors):
                new = self._empty(capacity)
                new[:, :keep_rows] = old[:, :keep_rows]
                tensors[layer] = new
        self.capacity = capacity

    def tensors(self) -> Iterator[Tensor]:
        yield from self.k
        yield from self.v


class Strip:
    """What ``layout`` says, per layer [capacity, width] (None where that is 0): ``v``, ``k`` and ``hidden``.

    ``covered`` are the disjoint, ascending ranges of positions that hold values; everything else was never computed
    and must not be read.
    """

    def __init__(self, layout: StripLayout, cache_layout: CacheLayout, capacity: int) -> None:
        self.layout = layout
        self._dtype, self._device = cache_layout.dtype, cache_layout.device
        self.v = [self._empty(capacity, rank) for rank in layout.v_ranks]
        self.k = [self._empty(capacity, rank) for rank in layout.k_ranks]
        self.hidden = [self._empty(capacity, width) for width in layout.h_widths]
        self.covered: list[tuple[int, int]] = []

    def _empty(self, capacity: int, width: int) -> Tensor | None:
        if width == 0:
            return None
        return torch.empty((capacity, width), dtype=self._dtype, device=self._device)

    def parts(self) -> Iterator[tuple[str, list[Tensor | None]]]:
        """Its tensors per layer, by what they are: "v", "k" and "h"."""
        yield from (("v", self.v), ("k", self.k), ("h", self.hidden))

    def cover(self, start: int, end: int) -> None:
        """Mark the positions ``start`` to ``end`` as computed."""
        merged: list[tuple[int, int]] = []
        for low, high in sorted([*self.covered, (start, end)]):
            if merged and low <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
            elif low < high:
                merged.append((low, high))
        self.covered = merged

    def uncover(self, start: int, end: int) -> None:
        """Mark the positions ``start`` to ``end`` as not computed."""
        kept = [(low, min(high, start)) for low, high in self.covered]
        kept += [(max(low, end), high) for low, high in self.covered]
        self.covered = sorted((low, high) for low, high in kept if low < high)

    def missing(self, end: int) -> list[tuple[int, int]]:
        """The ranges below ``end`` that were never computed."""
        gaps, position = [], 0
        for low, high in self.covered:
            if low >= end:
                break
            if low > position:
                gaps.append((position, low))
            position = high
        if position < end:
            gaps.append((position, end))
        return gaps

    def truncate(self, length: int) -> None:
        self.covered = [(low, min(high, length)) for low, high in self.covered if low < length]

    def grow(self, capacity: int, keep_rows: int) -> None:
        for _, tensors in self.parts():
            for layer, old in enumerate(tensors):
                if old is not None:
                    new = old.new_empty((capacity, old.shape[1]))
                    new[:keep_rows] = old[:keep_rows]
                    tensors[layer] = new

    def tensors(self) -> Iterator[Tensor]:
        for _, tensors in self.parts():
            yield from (tensor for tensor in tensors if tensor is not None)


@dataclass
class Trajectory:
    """One growing trajectory of a namespace (the agents that may share it).

    ``pending_from`` is the first position whose k and v_base still come from an adapted pass and await the neutral one
    (None: none). ``private`` holds a turn's adapted k and v while a neutral pass runs beside it. ``busy`` counts the
    turns that use it now; a busy trajectory is neither evicted nor truncated by others.
    """

    layout: CacheLayout
    namespace: str
    session_id: str
    length: int = 0
    runs: list[WriterRun] = field(default_factory=list)
    strips: dict[str, Strip] = field(default_factory=dict)
    pending_from: int | None = None
    private: KvBuffers | None = None
    busy: int = 0
    last_used: int = 0

    def __post_init__(self) -> None:
        self.base = KvBuffers(self.layout)
        self._tokens: TokenArray = np.empty(0, dtype=np.int32)

    @property
    def token_ids(self) -> TokenArray:
        """The cached token ids, [length]."""
        return self._tokens[: self.length]

    @property
    def capacity(self) -> int:
        return self.base.capacity

    # -- growing -------------------------------------------------------------------------------------------------

    def grow(self, capacity: int) -> None:
        """Make room for ``capacity`` tokens. The caller has checked the budget (see ``growth_bytes``)."""
        if capacity <= self.capacity:
            return
        self.base.grow(capacity, self.length)
        for strip in self.strips.values():
            strip.grow(capacity, self.length)
        tokens = np.empty(capacity, dtype=np.int32)
        tokens[: self.length] = self.token_ids
        self._tokens = tokens

    def add_strip(self, layout: StripLayout) -> Strip:
        """The strip of that key, created empty if there is none."""
        if layout.key not in self.strips:
            self.strips[layout.key] = Strip(layout, self.layout, self.capacity)
        return self.strips[layout.key]

    def open_private(self, capacity: int) -> KvBuffers:
        """Buffers for a turn's own k and v from ``length`` on, or the open ones grown to ``capacity`` rows."""
        if self.private is None:
            self.private = KvBuffers(self.layout, start=self.length)
        if capacity > self.private.capacity:
            self.private.grow(capacity, self.length - self.private.start)
        return self.private

    # -- writing -------------------------------------------------------------------------------------------------

    def commit(self, token_ids: Sequence[int], writer: Writer) -> None:
        """Make the rows that a finished pass wrote behind ``length`` valid."""
        start, end = self.length, self.length + len(token_ids)
        self._tokens[start:end] = token_ids
        self.length = end
        if self.runs and self.runs[-1].writer == writer:
            self.runs[-1] = WriterRun(self.runs[-1].start, end, writer)
        elif end > start:
            self.runs.append(WriterRun(start, end, writer))

    def truncate(self, length: int) -> None:
        """Forget everything from position ``length`` on. Raises ValueError outside 0 to the present length."""
        if not 0 <= length <= self.length:
            raise ValueError(f"truncate: got {length}, allowed is 0 to {self.length}")
        self.length = length
        self.runs = [
            WriterRun(run.start, min(run.end, length), run.writer)
            for run in self.runs
            if run.start < length
        ]
        for strip in self.strips.values():
            strip.truncate(length)
        if self.pending_from is not None and self.pending_from >= length:
            self.pending_from = None

    def copy_prefix(self, source: Trajectory, length: int) -> None:
        """Become a copy of the first ``length`` tokens of ``source``. Capacity must have been made."""
        for mine, theirs in zip(self.base.tensors(), source.base.tensors(), strict=True):
            mine[:, :length] = theirs[:, :length]
        for key, strip in source.strips.items():
            copy = self.add_strip(strip.layout)
            for mine, theirs in zip(copy.tensors(), strip.tensors(), strict=True):
                mine[:length] = theirs[:length]
            self.strips[key].covered = list(strip.covered)
        self._tokens[:length] = source.token_ids[:length]
        self.length, self.runs = source.length, list(source.runs)
        self.pending_from = source.pending_from
        self.truncate(length)

    # -- measuring -----------------------------------------------------------------------------------------------

    def tensors(self) -> Iterator[Tensor]:
        yield from self._growing()
        if self.private is not None:
            yield from self.private.tensors()

    def bytes_held(self) -> int:
        """Bytes of the distinct storages behind this trajectory."""
        return storage_bytes(self.tensors())

    def growth_bytes(self, capacity: int) -> int:
        """Bytes that are held more after ``grow(capacity)``; ``copied_bytes`` are needed on top while it runs."""
        added_rows = max(0, capacity - self.capacity)
        return sum(_bytes_per_row(tensor) for tensor in self._growing()) * added_rows

    def copied_bytes(self, capacity: int) -> int:
        """Bytes of the largest tensor that ``grow(capacity)`` copies: the one that exists twice."""
        if capacity <= self.capacity:
            return 0
        return max((tensor.nbytes for tensor in self._growing()), default=0)

    def _growing(self) -> Iterator[Tensor]:
        yield from self.base.tensors()
        for strip in self.strips.values():
            yield from strip.tensors()


def storage_bytes(tensors: Iterator[Tensor]) -> int:
    """Bytes of the distinct storages behind ``tensors``."""
    storages = {
        (storage.data_ptr(), storage.nbytes())
        for storage in (tensor.untyped_storage() for tensor in tensors)
        if storage.nbytes()
    }
    return sum(nbytes for _, nbytes in storages)


def _bytes_per_row(tensor: Tensor) -> int:
    """Bytes that one more token takes in a cache tensor [..., rows, width]."""
    leading = tensor.shape[0] if tensor.dim() == 3 else 1
    return leading * tensor.shape[-1] * tensor.element_size()
