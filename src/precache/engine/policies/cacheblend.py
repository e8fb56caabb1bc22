"""CacheBlend (arXiv 2405.16444): the reader recomputes the tokens whose values deviate most at an early layer."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from precache.engine.policies.base import Candidates, LayerGroup, Selection
from precache.engine.policies.recompute import Recompute, row_budget

CHECK_LAYER = 1


@dataclass(frozen=True)
class _TopRows(Selection):
    """The rows with the highest scores, a share of all."""

    rows: float
    layer: int = CHECK_LAYER

    def choose(self, candidates: Candidates) -> Tensor:
        scores = self.scores(candidates)
        count = row_budget(self.rows, len(scores))
        return scores.topk(count).indices.sort().values

    @abstractmethod
    def scores(self, candidates: Candidates) -> Tensor:
        """One number per row, the higher the more it should be recomputed."""


@dataclass(frozen=True)
class _Deviation(_TopRows):
    """Squared distance of the reader's values from the cached ones, over all heads."""

    def scores(self, candidates: Candidates) -> Tensor:
        return (candidates.fresh.float() - candidates.cached.float()).square().sum(-1)


@dataclass(frozen=True)
class _Chance(_TopRows):
    """A random number for every position, the same at every refresh."""

    seed: int = 0

    def scores(self, candidates: Candidates) -> Tensor:
        end = int(candidates.positions[-1]) + 1
        generator = torch.Generator().manual_seed(self.seed)
        return torch.rand(end, generator=generator)[candidates.positions]


class CacheBlend(Recompute):
    """All tokens in the first layer; at the second the values tell which of them go on, to the last layer.

    The values decide because with LoRA on q and v the keys of the first layers do not deviate. k and v of the chosen
    rows only are replaced from the check layer on, so that the budget holds: layer 0 for all and
    ``(share L - 1) / (L - 1)`` of the tokens for the other L - 1 layers. A share that does not cover layer 0 replaces
    nothing.
    """

    name = "cacheblend"

    def group(self, num_layers: int) -> LayerGroup | None:
        full = CHECK_LAYER  # layers that all rows go through
        if num_layers <= full:
            return None
        rows = (self.share * num_layers - full) / (num_layers - full)
        if rows <= 0:
            return None
        return LayerGroup(0, num_layers - 1, frozenset(range(num_layers)), self._selection(rows))

    def _selection(self, rows: float) -> Selection:
        return _Deviation(rows)


class RandomTokens(CacheBlend):
    """A control for `cacheblend`: as many tokens, drawn by ``recompute_seed``."""

    name = "random-tokens"
    settings: ClassVar[tuple[str, ...]] = (*CacheBlend.settings, "recompute_seed")

    def _selection(self, rows: float) -> Selection:
        return _Chance(rows, seed=self.config.recompute_seed)
