"""RelayCaching (arXiv 2603.13289): a range of middle layers, there the tokens that deviate or that are looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from precache.engine.policies.base import Candidates, LayerGroup, Selection
from precache.engine.policies.recompute import Recompute, layer_budget, row_budget
from precache.errors import ConfigError

DEVIATION_THRESHOLD = 1.5  # times the mean
INFLUENCE_THRESHOLD = 1.45
SUFFIX = 10  # tokens whose attention says what is looked at


@dataclass(frozen=True)
class _DeviationOrInfluence(Selection):
    """The rows that exceed either threshold by the largest factor, a share of all.

    Deviation is 1 - cos of the reader's values and the cached ones (heads concatenated), influence the attention of the
    last tokens that are refreshed. The published set, all rows above a threshold, is the front of this order; how many
    it has varies, so the budget cuts it, or fills up behind it.
    """

    layer: int
    rows: float
    suffix: int = SUFFIX

    def choose(self, candidates: Candidates) -> Tensor:
        fresh, cached = candidates.fresh.float(), candidates.cached.float()
        deviation = 1 - torch.cosine_similarity(fresh, cached, dim=-1)
        excess = torch.maximum(
            _factor(deviation, DEVIATION_THRESHOLD),
            _factor(candidates.attention, INFLUENCE_THRESHOLD),
        )
        count = row_budget(self.rows, len(excess))
        return excess.topk(count).indices.sort().values


def _factor(scores: Tensor, threshold: float) -> Tensor:
    """By what factor each score exceeds ``threshold`` times the mean; 0 where all are 0."""
    return (scores / (threshold * scores.mean())).nan_to_num(0.0)


class RelayCaching(Recompute):
    """Layers ``start`` to ``detection`` for all tokens, ``detection`` to ``end`` for the chosen ones, no others.

    ``start`` begins from the hidden states that the writer kept. Layers from the profile, else the middle of the model:
    a third of the layers outside the budget on either side, one layer before the detection.
    """

    name = "relaycaching"

    def group(self, num_layers: int) -> LayerGroup | None:
        if self.share == 0 or num_layers < 2:
            return None
        start, detection, end = self._range(num_layers)
        full, partial = detection - start, end - detection + 1
        budget = self.share * num_layers - full
        if budget <= 0 and self.section() is not None:
            raise ConfigError(
                f"recompute_profile {self.config.recompute_profile}: {self.name}",
                f"{full} layers before the detection",
                f"fewer than recompute_share={self.share:g} of {num_layers}",
            )
        if budget <= 0:
            return None
        rows = min(1.0, budget / partial)
        return LayerGroup(
            start, end, frozenset(range(start, end + 1)), _DeviationOrInfluence(detection, rows)
        )

    def _range(self, num_layers: int) -> tuple[int, int, int]:
        section = self.section()
        if section is not None:
            layers = cast(dict[str, int], section)
            return layers["start"], layers["detection"], layers["end"]
        margin = layer_budget((1 - self.share) / 3, num_layers)
        return margin, margin + 1, num_layers - 1 - margin
