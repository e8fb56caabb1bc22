"""`calibrated` (beyond the paper): PreLRShared plus a fitted low-rank correction of what a reader misses.

In rows that another agent wrote, a reader sees the writer's X where its own would be. What k and v lack by that is
partly linear in the writer's X; a calibration holds the best map of low rank, fitted in closed form on a few
trajectories. It is kept as more columns of the reader's strips, so the base stays shared and own tokens stay exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add
from typing import ClassVar

import torch
from torch import Tensor

from precache.adapters.bank import BASE_NAME, Adapter, AdapterBank
from precache.adapters.calibration import Calibration, load_calibration
from precache.adapters.spec import ModelShape
from precache.cache.layout import StripLayout
from precache.config import EngineConfig
from precache.engine.policies.base import PassSpec, StripReader, TurnPlan, WriterColumns
from precache.engine.policies.prelrshared import PreLRShared
from precache.errors import ConfigError, PolicyNotAllowedError


class Calibrated(PreLRShared):
    """PreLRShared's passes; strips have ``rank`` more columns for v and for k in the corrected layers.

    Tokens that a late adapter catches up by its own pass are not corrected, and neither is the base model as a reader.
    """

    name = "calibrated"
    settings: ClassVar[tuple[str, ...]] = ("calibration",)

    def __init__(self, schedule: str | None = None, config: EngineConfig | None = None) -> None:
        super().__init__(schedule, config)
        path = self.config.calibration
        self.calibration = None if path is None else load_calibration(path)
        self._made: dict[tuple[str, ...], _Reader | _Columns] = {}

    def check_model(self, shape: ModelShape, digest: Callable[[], str]) -> None:
        if self.calibration is None:
            return
        self.calibration.check(shape, str(self.config.calibration))
        if self.calibration.model != digest():
            raise ConfigError(
                "calibration", f"{self.config.calibration}, of another model", "one of this model"
            )

    def check(self, adapters: Sequence[Adapter]) -> None:
        """Raise PolicyNotAllowedError unless there is a calibration that was fitted to exactly these weights."""
        fitted = {} if self.calibration is None else self.calibration.adapters
        for adapter in adapters:
            if self.calibration is None:
                reason = "it needs a calibration (precache compare --calibrate writes one)"
                raise PolicyNotAllowedError(self.name, reason)
            if fitted.get(adapter.name) != adapter.digest:
                known = "other weights" if adapter.name in fitted else f"adapters {sorted(fitted)}"
                reason = f"its calibration was fitted to {known}, not to these of {adapter.name!r}"
                raise PolicyNotAllowedError(self.name, reason)

    def signature(self, shape: ModelShape) -> str:
        return self.name if self.calibration is None else f"{self.name} {self.calibration.digest}"

    def strip_of(self, adapter: Adapter | None, bank: AdapterBank) -> StripLayout | None:
        if adapter is None or self.calibration is None:
            return None
        corrected, rank = self.calibration.layers(adapter.name), self.calibration.rank
        extra = [rank if layer in corrected else 0 for layer in range(bank.shape.num_layers)]
        layout = StripLayout(
            adapter.digest,
            v_ranks=tuple(map(add, adapter.ranks("v_proj"), extra)),
            k_ranks=tuple(map(add, adapter.ranks("k_proj"), extra)),
        )
        return layout if layout.numbers_per_token else None

    def catch_up(self, adapter: Adapter | None, bank: AdapterBank) -> PassSpec | None:
        spec = super().catch_up(adapter, bank)
        return None if spec is None else replace(spec, reader=self._reader(adapter, bank))

    def turn(self, adapter: Adapter | None, bank: AdapterBank) -> TurnPlan:
        plan = super().turn(adapter, bank)
        adapted = replace(
            plan.adapted, reader=self._reader(adapter, bank), columns=self._columns(adapter, bank)
        )
        return replace(plan, adapted=adapted)

    # -- matrices, made once for the adapters that are loaded -------------------------------------------------------

    def _reader(self, adapter: Adapter | None, bank: AdapterBank) -> StripReader | None:
        if adapter is None or self.calibration is None:
            return None
        key = ("reader", adapter.digest)
        found = self._made.get(key)
        if not isinstance(found, _Reader):
            found = self._made[key] = _Reader.make(adapter, self.calibration, bank)
        return found

    def _columns(self, writer: Adapter | None, bank: AdapterBank) -> WriterColumns | None:
        if self.calibration is None or len(bank) == 0:
            return None
        name = BASE_NAME if writer is None else writer.name
        readers = tuple(adapter for adapter in bank if adapter.name != name)
        key = ("columns", name, *(adapter.digest for adapter in readers))
        found = self._made.get(key)
        if not isinstance(found, _Columns):
            found = self._made[key] = _Columns.make(name, readers, self.calibration, bank)
        return found


@dataclass(frozen=True)
class _Reader:
    """An adapter's B with the rows of the correction below it, by layer [num_kv_heads, rank, head_dim]."""

    values: Mapping[int, Tensor]
    keys: Mapping[int, Tensor]

    @classmethod
    def make(cls, adapter: Adapter, calibration: Calibration, bank: AdapterBank) -> _Reader:
        values: dict[int, Tensor] = {}
        keys: dict[int, Tensor] = {}
        for layer in range(bank.shape.num_layers):
            for made, own, fitted in (
                (values, adapter.value_b(layer), calibration.q_v.get((layer, adapter.name))),
                (keys, adapter.key_b(layer), calibration.q_k.get((layer, adapter.name))),
            ):
                parts = [] if own is None else [own]
                if fitted is not None:
                    parts.append(_by_head(fitted, bank))
                if parts:
                    made[layer] = torch.cat(parts, dim=1)
        return cls(values, keys)

    def value_b(self, layer: int) -> Tensor | None:
        return self.values.get(layer)

    def key_b(self, layer: int) -> Tensor | None:
        return self.keys.get(layer)


@dataclass(frozen=True)
class _Columns:
    """What one writer's X is multiplied with for all other readers at once, by layer."""

    stacks: Mapping[int, Tensor]  # [sum of ranks, hidden]
    places: Mapping[tuple[int, str], slice]  # (layer, strip key) -> its rows of the stack

    @classmethod
    def make(
        cls, writer: str, readers: Sequence[Adapter], calibration: Calibration, bank: AdapterBank
    ) -> _Columns:
        stacks: dict[int, Tensor] = {}
        places: dict[tuple[int, str], slice] = {}
        for layer in range(bank.shape.num_layers):
            parts: list[Tensor] = []
            for reader in readers:
                p = calibration.p.get((layer, writer, reader.name))
                if p is not None:
                    start = len(parts) * calibration.rank
                    places[layer, reader.digest] = slice(start, start + calibration.rank)
                    parts.append(p.t().to(bank.device, bank.dtype))
            if parts:
                stacks[layer] = torch.cat(parts).contiguous()
        return cls(stacks, places)

    def stack(self, layer: int) -> Tensor | None:
        return self.stacks.get(layer)

    def place(self, layer: int, key: str) -> slice | None:
        return self.places.get((layer, key))


def _by_head(fitted: Tensor, bank: AdapterBank) -> Tensor:
    """[rank, num_kv_heads * head_dim] -> [num_kv_heads, rank, head_dim] as the bank's adapters are."""
    heads = fitted.view(len(fitted), bank.shape.num_kv_heads, bank.shape.head_dim)
    return heads.transpose(0, 1).contiguous().to(bank.device, bank.dtype)
