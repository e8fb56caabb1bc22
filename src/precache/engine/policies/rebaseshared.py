"""ReBaseShared (PReCache, 2026): the shared base is rebuilt without adapters, so no reader sees a writer's drift."""

from __future__ import annotations

from typing import ClassVar

from precache.adapters.bank import Adapter, AdapterBank
from precache.cache.layout import StripLayout
from precache.engine.policies.base import (
    PassSpec,
    SharingPolicy,
    StripWrite,
    TurnPlan,
    strip_layout,
)

LAZY_PREFILL = "lazy-prefill"
IDLE_LAZY_PREFILL = "idle-lazy-prefill"
DOUBLE_BATCH = "double-batch"


class ReBaseShared(SharingPolicy):
    """k and v_base come from a neutral pass (adapters off, over the neutral base only), for every token.

    A reader's strip is the neutral X times its A, except over tokens that it wrote itself: there it keeps the strip of
    its adapted pass. The schedules reach the same cache state and differ in when the neutral pass runs: right after
    the turn (``lazy-prefill``), while the engine is idle (``idle-lazy-prefill``), or beside the turn
    (``double-batch``).
    """

    name = "rebaseshared"
    schedules: ClassVar[tuple[str, ...]] = (LAZY_PREFILL, DOUBLE_BATCH, IDLE_LAZY_PREFILL)
    base_is_neutral = True

    @property
    def when_idle(self) -> bool:
        return self.schedule == IDLE_LAZY_PREFILL

    def strip_of(self, adapter: Adapter | None, bank: AdapterBank) -> StripLayout | None:
        # Not shared among equal A: the writer's strip over its own tokens differs from the other readers'.
        return None if adapter is None else strip_layout(adapter.digest, adapter, bank)

    def catch_up(self, adapter: Adapter | None, bank: AdapterBank) -> PassSpec | None:
        layout = self.strip_of(adapter, bank)
        if adapter is None or layout is None:
            return None
        return PassSpec(None, writes_base=False, strips=(StripWrite(layout, adapter),))

    def turn(self, adapter: Adapter | None, bank: AdapterBank) -> TurnPlan:
        if adapter is None:  # the base model's own pass is the neutral pass
            return TurnPlan(PassSpec(None, strips=self.strips(bank)))
        layout = self.strip_of(adapter, bank)
        key = None if layout is None else layout.key
        own = tuple(write for write in self.strips(bank) if write.layout.key == key)
        others = tuple(write for write in self.strips(bank) if write.layout.key != key)
        adapted = PassSpec(adapter, reads=key, strips=own)
        if self.schedule == DOUBLE_BATCH:
            return TurnPlan(adapted, beside=PassSpec(None, strips=others))
        return TurnPlan(adapted, deferred=True)

    def deferred(self, bank: AdapterBank) -> PassSpec:
        return PassSpec(None, strips=self.strips(bank))
