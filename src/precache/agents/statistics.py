"""Means, spread and confidence intervals of scores. Bootstrap over questions, seeded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
CONFIDENCE = 0.95


class Estimate(NamedTuple):
    """A mean, the standard deviation of the repeats' means, and a 95 % interval over questions."""

    mean: float
    std: float
    low: float
    high: float


def estimate(
    scores: Sequence[Sequence[float]], span: tuple[float, float] | None = None
) -> Estimate:
    """Estimate from scores[question][repeat]. All questions have equally many repeats.

    `span` is the lowest and the highest score there can be. With it, questions that all score alike get an interval
    that says how little that proves; a bootstrap has nothing to draw from then.
    """
    table = np.asarray(scores, dtype=float)  # [questions, repeats]
    means = table.mean(axis=1)
    if span is not None and np.all(means == means[0]):
        low, high = _unseen(means, span)
    else:
        low, high = _bootstrap(means)
    spread = table.mean(axis=0).std(ddof=1) if table.shape[1] > 1 else 0.0
    return Estimate(float(table.mean()), float(spread), low, high)


def _unseen(values: NDArray[np.float64], span: tuple[float, float]) -> tuple[float, float]:
    """Bound the mean where all values are equal: as many others may exist as n draws can miss (Clopper-Pearson)."""
    missed = 1 - ((1 - CONFIDENCE) / 2) ** (1 / len(values))
    value = float(values[0])
    return value - missed * (value - span[0]), value + missed * (span[1] - value)


def _bootstrap(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return the percentile bootstrap of the mean."""
    rng = np.random.default_rng(0)
    picks = rng.integers(0, len(values), size=(RESAMPLES, len(values)))
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(values[picks].mean(axis=1), [tail, 100 - tail])
    return float(low), float(high)
