"""FullShared: one full cache for all; a reader sees k and v with the writer's LoRA in them."""

from __future__ import annotations

from precache.adapters.bank import Adapter, AdapterBank
from precache.engine.policies.base import PassSpec, SharingPolicy, TurnPlan


class FullShared(SharingPolicy):
    """The cheapest and least faithful way to share: the lower bound on cost and on quality."""

    name = "fullshared"

    def turn(self, adapter: Adapter | None, bank: AdapterBank) -> TurnPlan:
        return TurnPlan(PassSpec(adapter, folded=True))
