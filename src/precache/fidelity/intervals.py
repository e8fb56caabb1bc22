"""Percentile bootstrap over trajectories, seeded. All figures use the same resamples, so differences are paired."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
CONFIDENCE = 0.95
ROUNDING = 1e-6  # nats per token: what equal computations in another order may differ by

Values = Sequence[float] | NDArray[np.float64]


class Interval(NamedTuple):
    """A value and its 95 % interval; the ends are None where fewer than two trajectories count."""

    value: float
    low: float | None
    high: float | None

    def excludes_zero(self) -> bool:
        """Whether the interval is there and lies on one side of zero, by more than rounding."""
        if self.low is None or self.high is None:
            return False
        return self.low > ROUNDING or self.high < -ROUNDING

    def rounded(self, digits: int) -> str:
        """``0.12 [0.10, 0.14]``."""
        if self.low is None or self.high is None:
            return f"{self.value:.{digits}f}"
        return f"{self.value:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"

    def __str__(self) -> str:
        return self.rounded(4)


class Resampling:
    """How often each of ``num_trajectories`` is drawn in every resample, [resamples, num_trajectories]."""

    def __init__(self, num_trajectories: int, seed: int = 0, resamples: int = RESAMPLES) -> None:
        rng = np.random.default_rng(seed)
        even = np.full(num_trajectories, 1 / num_trajectories)
        self._counts = rng.multinomial(num_trajectories, even, size=resamples)

    def mean(self, sums: Values, weights: Values) -> Interval:
        """sum(sums) / sum(weights), such as nats per token: one value each a trajectory."""
        top, bottom = np.asarray(sums, dtype=float), np.asarray(weights, dtype=float)
        value = float(top.sum() / bottom.sum())
        drawn = self._counts @ bottom
        ratios = (self._counts @ top)[drawn > 0] / drawn[drawn > 0]
        return self._interval(value, ratios, int((bottom > 0).sum()))

    def maximum(self, values: Values) -> Interval:
        """The largest value; -inf does not count.

        The interval's upper end is what was seen: a bootstrap knows nothing beyond it.
        """
        array = np.asarray(values, dtype=float)
        maxima = np.where(self._counts > 0, array, -np.inf).max(axis=1)
        maxima = maxima[np.isfinite(maxima)]
        return self._interval(float(array.max()), maxima, int(np.isfinite(array).sum()))

    def _interval(
        self, value: float, resampled: NDArray[np.float64], num_counting: int
    ) -> Interval:
        if num_counting < 2:
            return Interval(value, None, None)
        tail = 100 * (1 - CONFIDENCE) / 2
        low, high = np.percentile(resampled, [tail, 100 - tail])
        return Interval(value, float(low), float(high))
