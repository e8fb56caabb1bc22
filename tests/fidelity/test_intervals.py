"""The bootstrap: paired, seeded, silent where it knows nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest

from precache.fidelity.intervals import Interval, Resampling


def test_a_mean_weighs_trajectories_by_their_tokens() -> None:
    found = Resampling(3).mean([1.0, 4.0, 9.0], [1, 2, 3])
    assert found.value == pytest.approx(14 / 6)
    assert found.low is not None
    assert found.high is not None
    assert 1.0 <= found.low < found.value < found.high <= 3.0


def test_the_interval_is_that_of_normal_theory_for_many_trajectories() -> None:
    values = np.random.default_rng(3).normal(5.0, 2.0, size=400)
    found = Resampling(400).mean(values, np.ones(400))
    half = 1.96 * values.std() / 20
    assert found.low == pytest.approx(found.value - half, abs=0.05)
    assert found.high == pytest.approx(found.value + half, abs=0.05)


def test_the_same_seed_gives_the_same_interval() -> None:
    values, ones = np.random.default_rng(0).normal(size=30), np.ones(30)
    first = Resampling(30, seed=1).mean(values, ones)
    assert first == Resampling(30, seed=1).mean(values, ones)
    assert first != Resampling(30, seed=2).mean(values, ones)


def test_differences_are_paired() -> None:
    resampling, ones = Resampling(6), [1.0] * 6
    first, second = [1.0, 9.0, 3.0, 7.0, 2.0, 8.0], [1.5, 9.5, 3.5, 7.5, 2.5, 8.5]
    alone = resampling.mean(second, ones)
    paired = resampling.mean([b - a for a, b in zip(first, second, strict=True)], ones)
    assert paired.low == paired.high == pytest.approx(0.5)
    assert paired.excludes_zero()
    assert alone.low is not None
    assert alone.low < resampling.mean(first, ones).value  # unpaired intervals overlap


def test_one_trajectory_has_no_interval() -> None:
    found = Resampling(3).mean([0.0, 4.0, 0.0], [0, 2, 0])
    assert found == Interval(2.0, None, None)
    assert not found.excludes_zero()
    assert found.rounded(2) == "2.00"


def test_trajectories_without_the_role_do_not_count() -> None:
    found = Resampling(4).mean([0.0, 2.0, 4.0, 0.0], [0, 1, 1, 0])
    assert found.value == 3.0
    assert (found.low, found.high) == (2.0, 4.0)
    largest = Resampling(4).maximum([-math.inf, 2.0, 4.0, -math.inf])
    assert largest == Interval(4.0, 2.0, 4.0)


@pytest.mark.parametrize(
    ("low", "high", "clear"),
    [(0.1, 0.3, True), (-0.3, -0.1, True), (-0.1, 0.2, False), (1e-9, 2e-9, False)],
)
def test_clear_of_zero(low: float, high: float, clear: bool) -> None:
    assert Interval(0.0, low, high).excludes_zero() is clear
