"""What repeats of one measurement are reported as."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of the repeats."""

    median: float
    low: float
    high: float


def spread_of(values: Sequence[float]) -> Spread:
    """The spread of at least one value."""
    return Spread(median(values), min(values), max(values))
