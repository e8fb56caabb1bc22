"""What a sharing policy is: an object that answers three questions, the same for every method.

* What may be reused?  ``namespace`` names the trajectories that an agent may continue, ``strip_of`` the strip it reads.
* What must run?       ``catch_up`` before the turn, ``turn`` for its own tokens, ``deferred`` after it.
* What is written?     each of these is a ``PassSpec``, and a pass says what it writes.

The engine runs passes and knows no policy. A new method is one file here, one line in the registry and one row in the
shared contract test.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from precache.adapters.bank import Adapter, AdapterBank
from precache.adapters.spec import ModelShape
from precache.cache.layout import StripLayout
from precache.config import EngineConfig
from precache.errors import UnknownPolicyError

SHARED = "shared"


@dataclass(frozen=True)
class StripWrite:
    """A strip that a pass fills: ``v_lora = X A`` with the A of ``adapter`` and the X of the pass.

    Without an adapter it has no low-rank part: hidden states, or nothing but the record of what ran.
    """

    layout: StripLayout
    adapter: Adapter | None = None


class StripReader(Protocol):
    """What a strip's columns are multiplied with when it is read, scaling included; an Adapter is one."""

    def value_b(self, layer: int) -> Tensor | None:
        """[num_kv_heads, columns of v_lora, head_dim], None where nothing is added to v."""

    def key_b(self, layer: int) -> Tensor | None:
        """[num_kv_heads, columns of k_lora, head_dim] before RoPE, None where nothing is added to k."""


class WriterColumns(Protocol):
    """What a pass fills the last columns of strips with, beside X A: X times a matrix of the writer for each reader."""

    def stack(self, layer: int) -> Tensor | None:
        """The matrices of all readers, [sum of columns, hidden]; None if there are none."""

    def place(self, layer: int, key: str) -> slice | None:
        """The rows of the stack for the strip of that key; None: its columns are 0."""


@dataclass(frozen=True)
class Candidates:
    """The rows of a selective pass at the layer where some of them are chosen.

    ``fresh`` are the values (v_proj's output, LoRA included) of the reader's own pass, ``cached`` those in the cache.
    ``attention`` is how much the last ``Selection.suffix`` rows looked at each, summed over the heads and the layers
    run before (zeros without a suffix).
    """

    positions: Tensor  # [rows] int64, ascending
    fresh: Tensor  # [rows, num_kv_heads * head_dim]
    cached: Tensor  # [rows, num_kv_heads * head_dim]
    attention: Tensor  # [rows] float32


class Selection(ABC):
    """Which rows of a pass go on. From ``layer`` on only these run, the layers before run all."""

    layer: int
    suffix: int = 0

    @abstractmethod
    def choose(self, candidates: Candidates) -> Tensor:
        """Ascending indices of the rows that go on, int64."""


@dataclass(frozen=True)
class LayerGroup:
    """The layers ``first`` to ``last`` that a pass over cached tokens runs; of the last one only k and v.

    It starts from the stored hidden states that enter ``first``, from the embeddings if that is 0. ``writes`` are the
    layers whose k and v it replaces; in the others it attends to what is cached and skips these projections.
    """

    first: int
    last: int
    writes: frozenset[int]
    selection: Selection | None = None

    def __post_init__(self) -> None:
        assert self.first <= min(self.writes), "the first layer whose k and v are replaced has run"
        assert self.last == max(self.writes), "of the last layer nothing but k and v is wanted"
        assert self.selection is None or self.selection.layer in self.writes


@dataclass(frozen=True)
class PassSpec:
    """One run of the model over some tokens of a trajectory.

    ``adapter`` is active in it (None: the base model). ``folded`` caches the full k and v, the adapter's LoRA included,
    instead of k, v_base and strips. ``reads`` is the key of the strip that its attention reads. A pass with
    ``writes_base`` False skips the key and value projections and attends to what is cached. With a ``group`` only those
    layers run, and k and v are replaced as it says. ``displaces``: for every other reader the rows count as not run.
    Strips wider than the adapters' A have further columns: ``columns`` fills them (None: with 0), and ``reader`` (None:
    the adapter) reads the whole strip.
    """

    adapter: Adapter | None
    folded: bool = False
    writes_base: bool = True
    reads: str | None = None
    strips: tuple[StripWrite, ...] = ()
    group: LayerGroup | None = None
    displaces: bool = False
    columns: WriterColumns | None = None
    reader: StripReader | None = None

    def writes(self, layer: int) -> bool:
        """Whether the pass stores k and v of a layer."""
        return self.writes_base and (self.group is None or layer in self.group.writes)


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
    settings: ClassVar[tuple[str, ...]] = ()  # fields of EngineConfig that only some policies read
    base_is_neutral: ClassVar[bool] = False  # k and v_base do not depend on any adapter

    def __init__(self, schedule: str | None = None, config: EngineConfig | None = None) -> None:
        """Read the method's settings from ``config`` (None: the defaults). Raises UnknownPolicyError, ConfigError."""
        if schedule is not None and schedule not in self.schedules:
            known = self.schedules or (f"none: {self.name} has no schedule",)
            raise UnknownPolicyError("schedule", schedule, known)
        self.schedule = schedule or (self.schedules[0] if self.schedules else None)
        self.config = config or EngineConfig()

    @property
    def when_idle(self) -> bool:
        """Whether deferred passes wait for a moment when the engine has nothing else to do."""
        return False

    def signature(self, shape: ModelShape) -> str:
        """What a saved cache must have in common with this policy: its name, and the settings that shape the cache."""
        return self.name

    def check_model(  # noqa: B027 - most policies work with every model
        self, shape: ModelShape, digest: Callable[[], str]
    ) -> None:
        """Raise ConfigError if the method's settings do not fit the model of that shape and digest."""

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
        for adapter in (None, *bank):
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
    layout = StripLayout(key, v_ranks=adapter.ranks("v_proj"), k_ranks=adapter.ranks("k_proj"))
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
