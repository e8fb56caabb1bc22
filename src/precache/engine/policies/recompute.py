"""What the selective-recompute methods have in common: one full cache, and a reader that replaces a part of it.

Not a method itself. Before its turn a reader runs its own adapter over the cached tokens that it has not been over
yet, in some layers and for some of the rows, and overwrites k and v there: one copy, as in the comparisons of LRAgent.
The budget is the share of (token, layer) pairs whose k and v are replaced.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

from precache.adapters.bank import BASE_NAME, Adapter, AdapterBank
from precache.adapters.spec import ModelShape
from precache.cache.layout import StripLayout
from precache.config import EngineConfig
from precache.engine.policies.base import (
    LayerGroup,
    PassSpec,
    SharingPolicy,
    StripWrite,
    TurnPlan,
)
from precache.engine.policies.profile import load_profile
from precache.errors import ConfigError

_SLACK = 1e-9  # so that 0.3 of 30 layers are 9


class Recompute(SharingPolicy):
    """Full k and v of whoever came last; ``group`` says what a reader replaces, None if it replaces nothing.

    Every agent, the base model too, has a strip without numbers that records the tokens its passes have been over. The
    hidden states that a group starts from are kept by whoever runs a token first.
    """

    settings: ClassVar[tuple[str, ...]] = (
        "recompute_share",
        "recompute_profile",
        "recompute_again",
    )

    def __init__(self, schedule: str | None = None, config: EngineConfig | None = None) -> None:
        super().__init__(schedule, config)
        path = self.config.recompute_profile
        self.profile = None if path is None else load_profile(path)

    @abstractmethod
    def group(self, num_layers: int) -> LayerGroup | None:
        """What a reader's pass runs and replaces within the budget. Raises ConfigError if the profile exceeds it."""

    @property
    def share(self) -> float:
        """The largest share of k and v that a reader replaces."""
        return self.config.recompute_share

    def section(self) -> dict[str, object] | None:
        """This method's layers in the profile, None without."""
        found = None if self.profile is None else self.profile.policies.get(self.name)
        return None if found is None else dict(found)

    def check_model(self, shape: ModelShape, digest: Callable[[], str]) -> None:
        if self.profile is not None and self.profile.num_layers != shape.num_layers:
            raise ConfigError(
                "recompute_profile",
                f"{self.config.recompute_profile}, made for {self.profile.num_layers} layers",
                f"one for the model's {shape.num_layers} layers",
            )
        self.group(shape.num_layers)

    def signature(self, shape: ModelShape) -> str:
        return f"{self.name} {self.group(shape.num_layers)}"

    # -- the three questions -------------------------------------------------------------------------------------

    def strip_of(self, adapter: Adapter | None, bank: AdapterBank) -> StripLayout:
        return StripLayout(BASE_NAME if adapter is None else adapter.digest, in_base=True)

    def strips(self, bank: AdapterBank) -> tuple[StripWrite, ...]:
        return (*super().strips(bank), *self._hidden(bank.shape))

    def catch_up(self, adapter: Adapter | None, bank: AdapterBank) -> PassSpec | None:
        group = self.group(bank.shape.num_layers)
        if group is None:
            return None
        return PassSpec(
            adapter,
            folded=True,
            strips=(StripWrite(self.strip_of(adapter, bank)),),
            group=group,
            displaces=self.config.recompute_again,
        )

    def turn(self, adapter: Adapter | None, bank: AdapterBank) -> TurnPlan:
        own = StripWrite(self.strip_of(adapter, bank))
        return TurnPlan(PassSpec(adapter, folded=True, strips=(own, *self._hidden(bank.shape))))

    def _hidden(self, shape: ModelShape) -> tuple[StripWrite, ...]:
        """Where a group does not start from the embeddings: the hidden states that enter it."""
        group = self.group(shape.num_layers)
        if group is None or group.first == 0:
            return ()
        widths = [0] * shape.num_layers
        widths[group.first] = shape.in_features["q_proj"]
        return (StripWrite(StripLayout(f"hidden-{group.first}", h_widths=tuple(widths))),)


def layer_budget(share: float, num_layers: int) -> int:
    """Whole layers within a share of them."""
    return int(share * num_layers + _SLACK)


def row_budget(share: float, rows: int) -> int:
    """Whole rows within a share of them."""
    return int(share * rows + _SLACK)
