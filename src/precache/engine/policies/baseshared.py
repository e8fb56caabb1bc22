"""BaseShared (LRAgent, arXiv 2602.01053): shared k and v_base, each agent's strip from its own pass."""

from __future__ import annotations

from precache.adapters.bank import Adapter, AdapterBank
from precache.cache.layout import StripLayout
from precache.engine.policies.base import (
    PassSpec,
    SharingPolicy,
    StripWrite,
    TurnPlan,
    own_catch_up,
    strip_layout,
)


class BaseShared(SharingPolicy):
    """Saves memory, not compute: before its turn an agent runs every token whose strip it does not have yet."""

    name = "baseshared"

    def strip_of(self, adapter: Adapter | None, bank: AdapterBank) -> StripLayout | None:
        return None if adapter is None else strip_layout(adapter.digest, adapter, bank)

    def catch_up(self, adapter: Adapter | None, bank: AdapterBank) -> PassSpec | None:
        return own_catch_up(adapter, self.strip_of(adapter, bank))

    def turn(self, adapter: Adapter | None, bank: AdapterBank) -> TurnPlan:
        layout = self.strip_of(adapter, bank)
        if adapter is None or layout is None:
            return TurnPlan(PassSpec(adapter))
        own = (StripWrite(layout, adapter),)
        return TurnPlan(PassSpec(adapter, reads=layout.key, strips=own))
