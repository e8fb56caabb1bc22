"""NonShared: every agent prefills the whole trajectory with its own adapter and keeps its own full cache."""

from __future__ import annotations

from precache.adapters.bank import BASE_NAME, Adapter, AdapterBank
from precache.engine.policies.base import PassSpec, SharingPolicy, TurnPlan


class NonShared(SharingPolicy):
    """Exact, and what serving stacks do today: the cache is keyed by adapter, nothing is shared."""

    name = "nonshared"

    def namespace(self, adapter: Adapter | None) -> str:
        return BASE_NAME if adapter is None else adapter.digest

    def turn(self, adapter: Adapter | None, bank: AdapterBank) -> TurnPlan:
        return TurnPlan(PassSpec(adapter, folded=True))
