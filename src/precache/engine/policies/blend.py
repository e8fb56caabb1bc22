"""`blend` (beyond the paper): between PreLRShared's base and ReBaseShared's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

from precache.adapters.bank import Adapter, AdapterBank
from precache.adapters.spec import ModelShape
from precache.engine.policies.base import PassSpec, TurnPlan
from precache.engine.policies.rebaseshared import (
    IDLE_LAZY_PREFILL,
    LAZY_PREFILL,
    ReBaseShared,
)
from precache.errors import ConfigError


class Blend(ReBaseShared):
    """k and v_base are a mix, weighted per layer, of the neutral pass's and the writer's adapted pass's.

    There is one base, the mixed one, so the neutral pass attends to it too, its own tokens included. Strips are those
    of ReBaseShared, and so is everything at a weight of 1. A token waits with its adapted k and v for the neutral pass;
    beside the turn there would be nothing to mix with in the last layer yet, so there is no double batching.
    """

    name = "blend"
    settings: ClassVar[tuple[str, ...]] = ("blend_weight",)
    schedules: ClassVar[tuple[str, ...]] = (LAZY_PREFILL, IDLE_LAZY_PREFILL)
    base_is_neutral = False

    def weights(self, num_layers: int) -> tuple[float, ...]:
        """How much of each layer's base is neutral."""
        weight = self.config.blend_weight
        return weight if isinstance(weight, tuple) else (weight,) * num_layers

    def check_model(self, shape: ModelShape, digest: Callable[[], str]) -> None:
        given = len(self.weights(shape.num_layers))
        if given != shape.num_layers:
            raise ConfigError("blend_weight", f"{given} weights", f"one, or {shape.num_layers}")

    def signature(self, shape: ModelShape) -> str:
        return f"{self.name} {self.weights(shape.num_layers)}"

    def turn(self, adapter: Adapter | None, bank: AdapterBank) -> TurnPlan:
        plan = super().turn(adapter, bank)
        assert plan.beside is None, "mixing needs the adapted k and v first"
        return plan

    def deferred(self, bank: AdapterBank) -> PassSpec:
        return replace(super().deferred(bank), weights=self.weights(bank.shape.num_layers))
