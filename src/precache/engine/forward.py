"""One forward pass as data: which rows run for which adapter, where they read and where they write.

Hidden states are flattened, [1, rows, hidden]: a lane is a run of rows, so one pass can hold any mix of adapters and
trajectories (double batching puts the adapted and the neutral lane side by side).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from precache.adapters.bank import Adapter, AdapterBank
from precache.cache.trajectory import KvBuffers, Strip, Trajectory
from precache.engine.policies.base import PassSpec
from precache.ops import lora_attention, merge_attention
from precache.ops.contract import AttentionOutput, KeyStrip, ValueStrip

RopeTables = Callable[[int, int], tuple[Tensor, Tensor]]
"""(layer, length) -> cos and sin [length, head_dim] of the positions 0 to length."""


class KeyValuesStored(Exception):
    """Ends a layer early: k and v are in the cache and nobody needs what would follow."""


@dataclass(frozen=True)
class Lane:
    """``token_ids`` at positions ``start`` and up of one trajectory, run as ``spec`` says.

    ``private`` takes the k and v instead of the trajectory's base buffers (positions before it are read from there).
    ``logits`` is how many of the last rows need logits.
    """

    token_ids: Sequence[int]
    start: int
    spec: PassSpec
    trajectory: Trajectory
    private: KvBuffers | None = None
    logits: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    def head(self) -> Lane:
        """The rows whose logits nobody needs."""
        return replace(self, token_ids=self.token_ids[: len(self.token_ids) - self.logits])

    def tail(self) -> Lane:
        """The rows whose logits are needed."""
        first = len(self.token_ids) - self.logits
        return replace(self, token_ids=self.token_ids[first:], start=self.start + first)


class Forward:
    """The lanes of one forward pass, as the projections and the attention of every layer see them."""

    def __init__(
        self,
        lanes: Sequence[Lane],
        bank: AdapterBank,
        rope_tables: RopeTables,
        backend: str,
        *,
        keys_values_only: bool = False,
    ) -> None:
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
        self.writes_base = any(lane.spec.writes_base for _, lane in self.lanes)

    def positions(self) -> list[int]:
        return [position for _, lane in self.lanes for position in range(lane.start, lane.end)]

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
                low_rank = torch.mm(x[0, rows], module.lora_a.t())
                y[0, rows].addmm_(low_rank, module.lora_b.t())
        return y

    def write_strips(self, x: Tensor, layer: int, target: str) -> None:
        """Store X A of every strip that a lane writes: one product for all adapters. x is [1, rows, in]."""
        for rows, lane in self.lanes:
            if not lane.spec.strips:
                continue
            adapters = tuple(write.adapter for write in lane.spec.strips)
            stacked, slices = self._bank.stacked_a(layer, target, adapters)
            if stacked.shape[0] == 0:
                continue
            z = torch.mm(x[0, rows], stacked.t())
            for write, columns in zip(lane.spec.strips, slices, strict=True):
                buffer = _strip_tensor(lane.trajectory.strips[write.layout.key], layer, target)
                if buffer is not None:
                    buffer[lane.start : lane.end] = z[:, columns]

    # -- attention -----------------------------------------------------------------------------------------------

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, masking: Masking) -> Tensor:
        """Store the new k and v and attend to what is cached.

        q is [1, num_heads, rows, head_dim], k and v [1, num_kv_heads, rows, head_dim], all after RoPE. Returns
        [1, rows, num_heads, head_dim]. Raises KeyValuesStored where nothing but k and v is wanted.
        """
        for rows, lane in self.lanes:
            if lane.spec.writes_base:
                buffers = lane.private or lane.trajectory.base
                buffers.write(layer, lane.start, k[0, :, rows], v[0, :, rows])
        if self.keys_values_only:
            raise KeyValuesStored
        outputs = [
            self._attend_lane(layer, q[0, :, rows], lane, masking) for rows, lane in self.lanes
        ]
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        return joined.transpose(0, 1).unsqueeze(0)

    def _attend_lane(self, layer: int, q: Tensor, lane: Lane, masking: Masking) -> Tensor:
        base, private = lane.trajectory.base, lane.private
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
        return lora_attention(
            q,
            k,
            v,
            scale=masking.scale,
            q_positions=lane.start,
            kv_start=buffers.start,
            v_lora=v_lora,
            k_lora=k_lora,
            window=masking.window,
            softcap=masking.softcap,
            backend=self._backend,
        )

    def _read_strip(
        self, layer: int, lane: Lane, start: int, end: int
    ) -> tuple[ValueStrip | None, KeyStrip | None]:
        adapter, key = lane.spec.adapter, lane.spec.reads
        if adapter is None or key is None:
            return None, None
        strip = lane.trajectory.strips[key]
        return _value_strip(strip, adapter, layer, start, end), self._key_strip(
            strip, adapter, layer, start, end
        )

    def _key_strip(
        self, strip: Strip, adapter: Adapter, layer: int, start: int, end: int
    ) -> KeyStrip | None:
        z, b = strip.k[layer], adapter.key_b(layer)
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


class ForwardHolder(Protocol):
    """Where the projections find the pass that is running now."""

    current: Forward | None


def _strip_tensor(strip: Strip, layer: int, target: str) -> Tensor | None:
    return strip.v[layer] if target == "v_proj" else strip.k[layer]


def _value_strip(
    strip: Strip, adapter: Adapter, layer: int, start: int, end: int
) -> ValueStrip | None:
    z, b = strip.v[layer], adapter.value_b(layer)
    return None if z is None or b is None else ValueStrip(z[start:end], b)
