"""What a sharing policy is: an object that answers three questions, the same for every method.

* What may be reused?  ``namespace`` names the trajectories that an agent may continue, ``strip_of`` the strip it reads.
* What must run?       ``catch_up`` before the turn, ``turn`` for its own tokens, ``deferred`` after it.
* What is written?     each of these is a ``PassSpec``, and a pass says what it writes.

The engine runs passes and knows no policy. A new method is one file here, one line in the registry and one row in the
shared contract test.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from precache.adapters.bank import Adapter, AdapterBank
from precache.cache.layout import StripLayout
from precache.errors import UnknownPolicyError

SHARED = "shared"


@dataclass(frozen=True)
class StripWrite:
    """A strip that a pass fills: ``v_lora = X A`` with the A of ``adapter`` and the X of the pass."""

    layout: StripLayout
    adapter: Adapter


@dataclass(frozen=True)
class PassSpec:
    """One run of the model over some tokens of a trajectory.

    ``adapter`` is active in it (None: the base model). ``folded`` caches the full k and v, the adapter's LoRA included,
    instead of k, v_base and strips. ``reads`` is the key of the strip that its attention reads. A pass with
    ``writes_base`` False skips the key and value projections and attends to what is cached.
    """

    adapter: Adapter | None
    folded: bool = False
    writes_base: bool = True
    reads: str | None = None
    strips: tuple[StripWrite, ...] = ()


@dataclass(frozen=True)
class TurnPlan:
    """The passes of a turn's own tokens.

    ``adapted`` gives the logits. ``beside``, if any, runs in the same forward passes and writes the cache, while the
    adapted pass keeps its k and v private. With ``deferred`` the policy's deferred pass replaces the turn's k and v
    afterwards, before anyone reads them.
    """

    adapted: PassSpec
    beside: PassSpec | None = None
    deferred: bool = False


class SharingPolicy(ABC):
    """One method of sharing a cache among agents. Stateless: everything it needs is passed in."""

    name: ClassVar[str]
    # The first is the default; none if it does not matter when the policy's passes run.
    schedules: ClassVar[tuple[str, ...]] = ()
    base_is_neutral: ClassVar[bool] = False  # k and v_base do not depend on any adapter

    def __init__(self, schedule: str | None = None) -> None:
        if schedule is not None and schedule not in self.schedules:
            known = self.schedules or (f"none: {self.name} has no schedule",)
            raise UnknownPolicyError("schedule", schedule, known)
        self.schedule = schedule or (self.schedules[0] if self.schedules else None)

    @property
    def when_idle(self) -> bool:
        """Whether deferred passes wait for a moment when the engine has nothing else to do."""
        return False

    def check(self, adapters: Sequence[Adapter]) -> None:  # noqa: B027 - most policies allow everything
        """Raise PolicyNotAllowedError if the method cannot serve these adapters together."""

    def namespace(self, adapter: Adapter | None) -> str:
        """The agents of one namespace continue each other's trajectories."""
        return SHARED

    def strip_of(self, adapter: Adapter | None, bank: AdapterBank) -> StripLayout | None:
        """The strip that the agent reads, None if it needs none."""
        return None

    def strips(self, bank: AdapterBank) -> tuple[StripWrite, ...]:
        """All strips that are kept, each once."""
        found: dict[str, StripWrite] = {}
        for adapter in bank:
            layout = self.strip_of(adapter, bank)
            if layout is not None:
                found.setdefault(layout.key, StripWrite(layout, adapter))
        return tuple(found.values())

    def catch_up(self, adapter: Adapter | None, bank: AdapterBank) -> PassSpec | None:
        """The pass over tokens that the agent's strip misses."""
        return None

    def deferred(self, bank: AdapterBank) -> PassSpec | None:
        """The pass that replaces the k and v of a finished turn; it fills only strips that miss these tokens."""
        return None

    @abstractmethod
    def turn(self, adapter: Adapter | None, bank: AdapterBank) -> TurnPlan:
        """The passes over the turn's own tokens."""


def strip_layout(key: str, adapter: Adapter, bank: AdapterBank) -> StripLayout | None:
    """Layout of an adapter's strip; None if it has neither value nor key LoRA."""
    layers = range(bank.shape.num_layers)
    layout = StripLayout(
        key,
        v_ranks=tuple(adapter.rank(layer, "v_proj") for layer in layers),
        k_ranks=tuple(adapter.rank(layer, "k_proj") for layer in layers),
    )
    return layout if layout.numbers_per_token else None


def own_catch_up(adapter: Adapter | None, layout: StripLayout | None) -> PassSpec | None:
    """The agent's own pass over cached tokens: its hidden states, the shared k and v_base, its strip filled."""
    if adapter is None or layout is None:
        return None
    return PassSpec(
        adapter,
        writes_base=False,
        reads=layout.key,
        strips=(StripWrite(layout, adapter),),
    )
