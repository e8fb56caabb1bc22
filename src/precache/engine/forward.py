"""One forward pass as data: which rows run for which adapter, where they read and where they write.

Hidden states are flattened, [1, rows, hidden]: a lane is a run of rows, so one pass can hold any mix of adapters and
trajectories (double batching puts the adapted and the neutral lane side by side).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from precache.adapters.bank import Adapter, AdapterBank
from precache.cache.trajectory import KvBuffers, Strip, Trajectory
from precache.engine.policies.base import PassSpec, StripReader
from precache.engine.products import Products
from precache.engine.work import Work
from precache.ops import attention_mass, lora_attention, merge_attention
from precache.ops.contract import AttentionOutput, KeyStrip, ValueStrip

RopeTables = Callable[[int, int], tuple[Tensor, Tensor]]
"""(layer, length) -> cos and sin [length, head_dim] of the positions 0 to length."""


class KeyValuesStored(Exception):
    """Ends a layer early: k and v are in the cache and nobody needs what would follow."""


@dataclass(frozen=True)
class Lane:
    """``token_ids`` at positions ``start`` and up of one trajectory, run as ``spec`` says.

    ``scattered`` are the positions where they are not consecutive, ascending int64 on the CPU; ``start`` is the first
    then. ``private`` takes the k and v instead of the trajectory's base buffers (positions before it are read from
    there). ``logits`` is how many of the last rows need logits. ``watch`` sums what some of the rows look at.
    """

    token_ids: Sequence[int]
    start: int
    spec: PassSpec
    trajectory: Trajectory
    private: KvBuffers | None = None
    logits: int = 0
    scattered: Tensor | None = None
    watch: Watch | None = None

    @property
    def end(self) -> int:
        if self.scattered is not None:
            return int(self.scattered[-1]) + 1
        return self.start + len(self.token_ids)

    @property
    def positions(self) -> list[int]:
        if self.scattered is not None:
            return [int(position) for position in self.scattered.tolist()]
        return list(range(self.start, self.end))

    @property
    def index(self) -> slice | Tensor:
        """The positions, to index a buffer with."""
        return slice(self.start, self.end) if self.scattered is None else self.scattered

    def head(self) -> Lane:
        """The rows whose logits nobody needs."""
        assert self.scattered is None
        return replace(self, token_ids=self.token_ids[: len(self.token_ids) - self.logits])

    def tail(self) -> Lane:
        """The rows whose logits are needed."""
        assert self.scattered is None
        first = len(self.token_ids) - self.logits
        return replace(self, token_ids=self.token_ids[first:], start=self.start + first)


@dataclass
class Watch:
    """The attention that the rows at ``first`` and behind give to every position, summed over heads and layers."""

    first: int
    total: Tensor  # [positions] float32


class Forward:
    """The lanes of one forward pass, as the projections and the attention of every layer see them."""

    def __init__(
        self,
        lanes: Sequence[Lane],
        bank: AdapterBank,
        rope_tables: RopeTables,
        backend: str,
        products: Products,
        work: Work,
        *,
        keys_values_only: bool = False,
    ) -> None:
        self.work = work
        self.products = products
        self.lanes: list[tuple[slice, Lane]] = []
        self.keys_values_only = keys_values_only
        self._bank = bank
        self._rope_tables = rope_tables
        self._backend = backend
        row = 0
        for lane in lanes:
            if lane.token_ids:
                self.lanes.append((slice(row, row + len(lane.token_ids)), lane))
                row += len(lane.token_ids)
        self.num_rows = row
        # Which strips a pass fills is asked in every layer and answered once.
        self._low_rank = [_low_rank_strips(lane.spec) for _, lane in self.lanes]
        self._hidden = [
            (rows, lane, write.layout.key)
            for rows, lane in self.lanes
            for write in lane.spec.strips
            if any(write.layout.h_widths)
        ]
        self._last_product: tuple[int, int, Tensor] | None = None  # layer, first row, X P

    def writes(self, layer: int) -> bool:
        """Whether any lane stores k and v of a layer."""
        return any(lane.spec.writes(layer) for _, lane in self.lanes)

    def positions(self) -> list[int]:
        return [position for _, lane in self.lanes for position in lane.positions]

    def token_ids(self) -> list[int]:
        return [int(token_id) for _, lane in self.lanes for token_id in lane.token_ids]

    # -- projections ---------------------------------------------------------------------------------------------

    def add_lora(self, y: Tensor, x: Tensor, layer: int, target: str, *, folded: bool) -> Tensor:
        """y [1, rows, out] plus each lane's own LoRA of x [1, rows, in]; with ``folded`` only in folded lanes."""
        for rows, lane in self.lanes:
            adapter = lane.spec.adapter
            if adapter is None or (folded and not lane.spec.folded):
                continue
            module = adapter.module(layer, target)
            if module is not None:
                low_rank = self.products.linear(x[0, rows], module.lora_a)
                self.products.add(y[0, rows], low_rank, module.lora_b)
                self.work.add_product(len(low_rank), low_rank.shape[1], x.shape[2] + y.shape[2])
        return y

    def write_strips(self, x: Tensor, layer: int, target: str) -> None:
        """Store X A of every strip that a lane writes: one product for all adapters. x is [1, rows, in]."""
        for (rows, lane), (keys, adapters) in zip(self.lanes, self._low_rank, strict=True):
            if not keys:
                continue
            stacked, slices = self._bank.stacked_a(layer, target, adapters)
            z = self.products.linear(x[0, rows], stacked) if len(stacked) else None
            self.work.add_product(rows.stop - rows.start, stacked.shape[1], len(stacked))
            for key, columns in zip(keys, slices, strict=True):
                buffer = _strip_tensor(lane.trajectory.strips[key], layer, target)
                if buffer is None:
                    continue
                rank = columns.stop - columns.start
                if z is not None and rank:
                    buffer[lane.index, :rank] = z[:, columns]
                if rank < buffer.shape[1]:
                    buffer[lane.index, rank:] = self._further_columns(x, rows, lane, layer, key)

    def _further_columns(
        self, x: Tensor, rows: slice, lane: Lane, layer: int, key: str
    ) -> Tensor | float:
        """What the columns of a strip behind X A hold of some rows of x; one product for all strips and targets."""
        columns = lane.spec.columns
        place = None if columns is None else columns.place(layer, key)
        stack = None if columns is None else columns.stack(layer)
        if place is None or stack is None:
            return 0.0
        if self._last_product is None or self._last_product[:2] != (layer, rows.start):
            product = self.products.linear(x[0, rows], stack)
            self.work.add_product(len(product), stack.shape[1], stack.shape[0])
            self._last_product = layer, rows.start, product
        return self._last_product[2][:, place]

    def keep_hidden(self, layer: int, hidden_states: Tensor) -> None:
        """Store the hidden states [1, rows, hidden] that enter a layer in the strips that keep them."""
        for rows, lane, key in self._hidden:
            buffer = lane.trajectory.strips[key].hidden[layer]
            if buffer is not None:
                buffer[lane.index] = hidden_states[0, rows]

    # -- attention -----------------------------------------------------------------------------------------------

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, masking: Masking) -> Tensor:
        """Store the new k and v and attend to what is cached.

        q is [1, num_heads, rows, head_dim], k and v [1, num_kv_heads, rows, head_dim], all after RoPE. Returns
        [1, rows, num_heads, head_dim]. Raises KeyValuesStored where nothing but k and v is wanted.
        """
        for rows, lane in self.lanes:
            if lane.spec.writes(layer):
                buffers = lane.private or lane.trajectory.base
                buffers.write(layer, lane.index, k[0, :, rows], v[0, :, rows])
                self.work.kv_entries += len(lane.token_ids)
        if self.keys_values_only:
            raise KeyValuesStored
        self.work.token_layers += self.num_rows
        outputs = [
            self._attend_lane(layer, q[0, :, rows], lane, masking) for rows, lane in self.lanes
        ]
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        return joined.transpose(0, 1).unsqueeze(0)

    def _attend_lane(self, layer: int, q: Tensor, lane: Lane, masking: Masking) -> Tensor:
        base, private = lane.trajectory.base, lane.private
        if lane.watch is not None:
            self._watch(layer, q, lane, lane.watch, masking)
        if private is None:
            return self._attend_part(layer, q, lane, masking, base, lane.end).out
        own = self._attend_part(layer, q, lane, masking, private, lane.end)
        if private.start == 0:
            return own.out
        prefix = self._attend_part(layer, q, lane, masking, base, private.start)
        return merge_attention([prefix, own]).out

    def _attend_part(
        self, layer: int, q: Tensor, lane: Lane, masking: Masking, buffers: KvBuffers, end: int
    ) -> AttentionOutput:
        k, v = buffers.read(layer, end)
        v_lora, k_lora = self._read_strip(layer, lane, buffers.start, end)
        self._count_attention(q, lane, buffers.start, end, masking, v_lora, k_lora)
        return lora_attention(
            q,
            k,
            v,
            scale=masking.scale,
            q_positions=lane.start if lane.scattered is None else lane.scattered,
            kv_start=buffers.start,
            v_lora=v_lora,
            k_lora=k_lora,
            window=masking.window,
            softcap=masking.softcap,
            backend=self._backend,
        )

    def _watch(self, layer: int, q: Tensor, lane: Lane, watch: Watch, masking: Masking) -> None:
        """Add what the watched rows of a lane look at."""
        positions = torch.tensor(lane.positions)
        first = int((positions < watch.first).sum())
        if first == len(positions):
            return
        k, _ = lane.trajectory.base.read(layer, lane.end)
        self.work.add_product(q.shape[0] * (len(positions) - first), q.shape[2], lane.end)
        mass = attention_mass(
            q[:, first:],
            k,
            positions[first:],
            scale=masking.scale,
            window=masking.window,
            softcap=masking.softcap,
        )
        watch.total[: lane.end] += mass

    def _count_attention(
        self,
        q: Tensor,
        lane: Lane,
        start: int,
        end: int,
        masking: Masking,
        v_lora: ValueStrip | None,
        k_lora: KeyStrip | None,
    ) -> None:
        """Count the products of attention over the positions ``start`` to ``end``."""
        heads, rows, head_dim = q.shape
        seen = _seen(lane, start, end, masking.window)  # pairs of a row and a key
        self.work.flops += 4 * heads * head_dim * seen
        if v_lora is not None:
            rank = v_lora.z.shape[1]
            self.work.flops += 2 * heads * rank * (seen + rows * head_dim)
        if k_lora is not None:
            keys, rank = k_lora.z.shape
            self.work.add_product(keys, rank, k_lora.b.shape[0] * head_dim)

    def _read_strip(
        self, layer: int, lane: Lane, start: int, end: int
    ) -> tuple[ValueStrip | None, KeyStrip | None]:
        reader, key = lane.spec.reader or lane.spec.adapter, lane.spec.reads
        if reader is None or key is None:
            return None, None
        strip = lane.trajectory.strips[key]
        return _value_strip(strip, reader, layer, start, end), self._key_strip(
            strip, reader, layer, start, end
        )

    def _key_strip(
        self, strip: Strip, reader: StripReader, layer: int, start: int, end: int
    ) -> KeyStrip | None:
        z, b = strip.k[layer], reader.key_b(layer)
        if z is None or b is None:
            return None
        cos, sin = self._rope_tables(layer, end)
        return KeyStrip(z[start:end], b, cos[start:end], sin[start:end])


@dataclass(frozen=True)
class Masking:
    """Score scale, sliding window (tokens, None: none) and logit softcap (None: none) of one layer."""

    scale: float
    window: int | None
    softcap: float | None


def _low_rank_strips(spec: PassSpec) -> tuple[tuple[str, ...], tuple[Adapter, ...]]:
    """Keys and adapters of the strips that take X A."""
    writes = [(w.layout.key, w.adapter) for w in spec.strips if w.adapter is not None]
    return tuple(key for key, _ in writes), tuple(adapter for _, adapter in writes)


def _seen(lane: Lane, start: int, end: int, window: int | None) -> int:
    """Pairs of a row of the lane and a position from ``start`` to ``end`` (exclusive) that it sees."""
    if window is None and lane.scattered is None and end == lane.end:
        rows = len(lane.token_ids)
        return rows * (lane.start + 1 - start) + rows * (rows - 1) // 2
    last = [min(position + 1, end) for position in lane.positions]
    first = [start if window is None else max(start, p + 1 - window) for p in lane.positions]
    return sum(max(0, high - low) for low, high in zip(first, last, strict=True))


def _strip_tensor(strip: Strip, layer: int, target: str) -> Tensor | None:
    return strip.v[layer] if target == "v_proj" else strip.k[layer]


def _value_strip(
    strip: Strip, reader: StripReader, layer: int, start: int, end: int
) -> ValueStrip | None:
    z, b = strip.v[layer], reader.value_b(layer)
    return None if z is None or b is None else ValueStrip(z[start:end], b)
