"""PreLRShared (PReCache, 2026): whoever runs a token first computes the strips of all agents from its own X."""

from __future__ import annotations

from precache.adapters.bank import Adapter, AdapterBank
from precache.cache.layout import StripLayout
from precache.engine.policies.base import (
    PassSpec,
    SharingPolicy,
    TurnPlan,
    own_catch_up,
    strip_layout,
)


class PreLRShared(SharingPolicy):
    """FullShared's cost, BaseShared's quality; a reader's own tokens are exact.

    Adapters with bitwise equal A share one strip. Tokens that were run before an adapter came are caught up by that
    adapter's own pass, as in BaseShared.
    """

    name = "prelrshared"

    def strip_of(self, adapter: Adapter | None, bank: AdapterBank) -> StripLayout | None:
        return None if adapter is None else strip_layout(adapter.a_digest, adapter, bank)

    def catch_up(self, adapter: Adapter | None, bank: AdapterBank) -> PassSpec | None:
        return own_catch_up(adapter, self.strip_of(adapter, bank))

    def turn(self, adapter: Adapter | None, bank: AdapterBank) -> TurnPlan:
        layout = self.strip_of(adapter, bank)
        reads = None if layout is None else layout.key
        return TurnPlan(PassSpec(adapter, reads=reads, strips=self.strips(bank)))
