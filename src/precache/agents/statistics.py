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


def estimate(scores: Sequence[Sequence[float]]) -> Estimate:
    """Estimate from scores[question][repeat]. All questions have equally many repeats."""
    table = np.asarray(scores, dtype=float)  # [questions, repeats]
    low, high = _interval(table.mean(axis=1))
    spread = table.mean(axis=0).std(ddof=1) if table.shape[1] > 1 else 0.0
    return Estimate(float(table.mean()), float(spread), low, high)


def _interval(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return the percentile bootstrap of the mean."""
    rng = np.random.default_rng(0)
    picks = rng.integers(0, len(values), size=(RESAMPLES, len(values)))
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(values[picks].mean(axis=1), [tail, 100 - tail])
    return float(low), float(high)
