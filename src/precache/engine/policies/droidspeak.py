"""DroidSpeak (arXiv 2411.02820): the reader recomputes one group of layers; the others keep the sender's k and v.

Two variants beside the published contiguous group: the scattered layers of LRAgent's reproduction (arXiv 2602.01053),
and scattered layers drawn at random, a control at the same budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, cast

import torch

from precache.engine.policies.base import LayerGroup
from precache.engine.policies.recompute import Recompute, layer_budget
from precache.errors import ConfigError


class _Layers(Recompute):
    """Replaces k and v of some layers, for every token that the reader has not been over."""

    def group(self, num_layers: int) -> LayerGroup | None:
        """From the first of its layers to the last; in the layers between that it does not replace, it attends only."""
        budget, section = layer_budget(self.share, num_layers), self.section()
        layers = self._default(budget, num_layers)
        if section is not None and self.share > 0:
            layers = cast(list[int], section["layers"])
        if len(layers) > budget:
            raise ConfigError(
                f"recompute_profile {self.config.recompute_profile}: {self.name}.layers",
                f"{len(layers)} layers",
                f"at most {budget}, which is recompute_share={self.share:g} of {num_layers}",
            )
        if not layers:
            return None
        return LayerGroup(layers[0], layers[-1], frozenset(layers))

    def _default(self, budget: int, num_layers: int) -> Sequence[int]:
        """The first layers: they need no profile and no hidden states."""
        return range(budget)


class DroidSpeak(_Layers):
    """One contiguous group, chosen by measurement (profile), else the first layers."""

    name = "droidspeak"


class DroidSpeakScattered(_Layers):
    """Layers anywhere: hidden states go through the layers between, where only the k and v projections are saved."""

    name = "droidspeak-scattered"

    def _default(self, budget: int, num_layers: int) -> Sequence[int]:
        """Evenly spread, the first layer and the last among them."""
        if budget == 1:
            return [0]
        return [round(i * (num_layers - 1) / (budget - 1)) for i in range(budget)]


class RandomLayers(_Layers):
    """A control for `droidspeak-scattered`: as many layers, drawn by ``recompute_seed``."""

    name = "random-layers"
    settings: ClassVar[tuple[str, ...]] = (*_Layers.settings, "recompute_seed")

    def _default(self, budget: int, num_layers: int) -> Sequence[int]:
        generator = torch.Generator().manual_seed(self.config.recompute_seed)
        drawn: list[int] = torch.randperm(num_layers, generator=generator)[:budget].tolist()
        return sorted(drawn)
