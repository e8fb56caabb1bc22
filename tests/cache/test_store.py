"""Which trajectory a prompt continues, the truncate-or-fork rule, the budget, and why a lookup missed."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from precache.cache.layout import CacheLayout, StripLayout
from precache.cache.store import (
    FORK_MIN_TAIL,
    Kept,
    Lookup,
    TrajectoryStore,
    common_prefix,
)
from precache.cache.trajectory import Trajectory, Writer
from precache.errors import CacheBudgetError, UnknownSessionError

LAYOUT = CacheLayout(1, 1, 2, torch.float32, torch.device("cpu"))
TOKEN_BYTES = LAYOUT.base_bytes_per_token  # 16
PLAN = Writer("plan", "d1")


def store_of(tokens: int = 100_000) -> TrajectoryStore:
    return TrajectoryStore(LAYOUT, tokens * TOKEN_BYTES, growth_tokens=1)


def run(
    store: TrajectoryStore, tokens: list[int], namespace: str = "shared", writer: Writer = PLAN
) -> tuple[Trajectory, int]:
    """A turn as the engine does it, without a model."""
    trajectory, matched = store.checkout(tokens, namespace)
    store.reserve(trajectory, len(tokens), [])
    trajectory.commit(tokens[matched:], writer)
    store.release(trajectory)
    return trajectory, matched


def test_common_prefix() -> None:
    def array(*ids: int) -> np.ndarray:
        return np.array(ids, dtype=np.int32)

    assert common_prefix(array(), array(1)) == 0
    assert common_prefix(array(1, 2, 3), array(1, 2, 4)) == 2
    assert common_prefix(array(1, 2), array(1, 2, 4)) == 2
    assert common_prefix(array(9), array(1)) == 0


def test_the_last_prompt_token_always_runs() -> None:
    store = store_of()
    run(store, [1, 2, 3, 4])
    _, matched = run(store, [1, 2, 3, 4])
    assert matched == 3


def test_the_longest_prefix_wins() -> None:
    store = store_of()
    run(store, [1, 2, *range(1000, 1400)])
    long, _ = run(store, [1, 2, 3, *range(2000, 2400)])
    trajectory, matched = run(store, [1, 2, 3, *range(2000, 2400), 5])
    assert trajectory is long
    assert matched == 403


def test_namespaces_do_not_meet() -> None:
    store = store_of()
    run(store, [1, 2, 3], "a")
    _, matched = run(store, [1, 2, 3], "b")
    assert matched == 0
    assert store.lookups[Lookup.COLD] == 2


def test_a_short_tail_is_truncated_in_place() -> None:
    store = store_of()
    first, _ = run(store, list(range(1000)))
    second, matched = run(store, [*range(1000 - FORK_MIN_TAIL), 7, 7])
    assert second is first
    assert matched == 1000 - FORK_MIN_TAIL
    assert len(store.trajectories) == 1
    assert second.token_ids.tolist()[-2:] == [7, 7]


def test_a_long_tail_forks_and_both_branches_survive() -> None:
    store = store_of()
    first, _ = run(store, list(range(1000)))
    second, matched = run(store, [*range(1000 - FORK_MIN_TAIL - 1), 7, 7])
    assert second is not first
    assert matched == 1000 - FORK_MIN_TAIL - 1
    assert first.length == 1000
    assert store.lookups[Lookup.DIVERGED] == 1
    _, matched = run(store, [*range(1000), 5])
    assert matched == 1000


def test_a_quarter_of_a_long_prefix_may_be_dropped() -> None:
    store = store_of()
    first, _ = run(store, list(range(5000)))
    second, _ = run(store, [*range(4001), 7])  # tail 999 <= 25 % of 4001
    assert second is first


def test_a_busy_trajectory_is_copied_never_cut() -> None:
    store = store_of()
    first, _ = run(store, list(range(50)))
    busy, _ = store.checkout([*range(50), 99], "shared")
    assert busy is first
    other, matched = store.checkout([*range(40), 7], "shared")
    assert other is not first
    assert matched == 40
    assert first.length == 50


def test_eviction_takes_the_least_recently_used_and_never_exceeds_the_budget() -> None:
    store = store_of(tokens=100)
    first, _ = run(store, [1, *range(40)])
    second, _ = run(store, [2, *range(40)])
    run(store, [1, *range(40)])  # the first is younger now
    run(store, [3, *range(40)])
    assert second not in store.trajectories
    assert first in store.trajectories
    assert store.evictions == 1
    assert store.bytes_held() <= store.budget
    run(store, [2, *range(40)])
    assert store.lookups[Lookup.EVICTED] == 1


def test_no_room_beside_running_turns_raises_and_harms_nothing() -> None:
    store = store_of(tokens=100)
    busy, _ = store.checkout([1, 2], "shared")
    store.reserve(busy, 60, [])
    other, _ = store.checkout([5, 6], "shared")
    with pytest.raises(CacheBudgetError, match="budget is 1600 bytes"):
        store.reserve(other, 60, [])
    assert busy.capacity == 60
    assert store.bytes_held() <= store.budget


def test_a_fork_that_does_not_fit_gives_up_the_older_branch() -> None:
    store = store_of(tokens=900)
    first, _ = run(store, list(range(800)))
    second, matched = run(store, [*range(400), 7])
    assert second is first
    assert matched == 400
    assert second.length == 401


def test_a_random_load_stays_under_the_budget_and_matches_exactly() -> None:
    rng = random.Random(0)
    store = TrajectoryStore(LAYOUT, 3000 * TOKEN_BYTES, growth_tokens=64)
    for _ in range(400):
        length = rng.randrange(1, 900)
        tokens = [rng.randrange(3) if i < 4 else i for i in range(length)]
        if length > 10 and rng.random() < 0.5:
            tokens[rng.randrange(4, length)] = -1
        trajectory, matched = run(store, tokens)
        assert matched < len(tokens)
        assert trajectory.token_ids.tolist() == tokens
        assert store.bytes_held() <= store.budget
    assert store.evictions > 0
    assert store.reused_tokens > 0
    assert sum(store.lookups.values()) == 400


def test_growth_steps_double_so_that_copies_stay_in_proportion_and_little_is_free() -> None:
    store = TrajectoryStore(LAYOUT, 10**9, growth_tokens=4)
    rounded = [store.rounded(tokens) for tokens in range(1, 20_000)]
    assert rounded == sorted(rounded)
    for tokens, capacity in enumerate(rounded, start=1):
        assert capacity >= tokens
        assert store.rounded(capacity) == capacity
        assert capacity - tokens < max(4, tokens / 32)
    capacities = sorted(set(rounded))
    assert sum(capacities[:-1]) < 64 * 20_000  # rows copied; 50 million with a fixed step
    assert rounded[200] == 204


def test_a_one_token_prompt_is_too_short_to_hit() -> None:
    store = store_of()
    run(store, [1, 2])
    run(store, [1])
    assert store.lookups[Lookup.TOO_SHORT] == 1


def test_nothing_in_common_is_diverged_not_cold() -> None:
    store = store_of()
    run(store, [1, 2])
    run(store, [3, 4])
    assert store.lookups[Lookup.COLD] == 1
    assert store.lookups[Lookup.DIVERGED] == 1


def test_a_hit_is_counted_with_its_tokens() -> None:
    store = store_of()
    run(store, [1, 2, 3])
    run(store, [1, 2, 3, 4])
    assert store.lookups[Lookup.HIT] == 1
    assert store.reused_tokens == 3


def keep(store: TrajectoryStore, stale: str = "", strips: tuple[str, ...] = ()) -> None:
    names = frozenset({"shared"})
    store.keep_only(Kept(frozenset(strips), names, lambda writer: writer.digest == stale))


def test_stale_writers_cut_everything_from_their_first_token() -> None:
    store = store_of()
    trajectory, _ = run(store, [1, 2, 3])
    run(store, [1, 2, 3, 4, 5], writer=Writer("act", "old"))
    run(store, [1, 2, 3, 4, 5, 6])
    keep(store, stale="old")
    assert trajectory.token_ids.tolist() == [1, 2, 3]
    run(store, [1, 2, 3, 4, 5, 6])
    assert store.lookups[Lookup.ADAPTER_CHANGED] == 1


def test_stale_tokens_of_a_busy_trajectory_are_not_matched_and_go_at_release() -> None:
    store = store_of()
    run(store, [1, 2, 3], writer=Writer("act", "old"))
    busy, _ = store.checkout([1, 2, 3, 4], "shared")
    keep(store, stale="old")
    assert busy.length == 3
    _, matched = store.checkout([1, 2, 3, 5], "shared")
    assert matched == 0
    store.release(busy)
    assert busy not in store.trajectories


def test_strips_that_nobody_reads_are_dropped() -> None:
    store = store_of()
    trajectory, _ = store.checkout([1, 2], "shared")
    layouts = [StripLayout("plan", (1,), (0,)), StripLayout("gone", (1,), (0,))]
    store.reserve(trajectory, 2, layouts)
    trajectory.commit([1, 2], PLAN)
    store.release(trajectory)
    keep(store, strips=("plan",))
    assert set(trajectory.strips) == {"plan"}


def test_rows_that_a_dropped_reader_wrote_go_with_its_strip() -> None:
    """Also while a turn uses them: they are not matched, and go when it ends."""
    store = store_of()
    trajectory, _ = store.checkout([1, 2, 3, 4], "shared")
    layouts = [StripLayout("plan", in_base=True), StripLayout("old", in_base=True)]
    store.reserve(trajectory, 4, layouts)
    trajectory.commit([1, 2, 3, 4], PLAN)
    trajectory.strips["plan"].cover(0, 4)
    trajectory.strips["old"].cover(2, 3)
    keep(store, strips=("plan",))
    assert trajectory.length == 4
    _, matched = store.checkout([1, 2, 3, 4, 5], "shared")
    assert matched == 2
    store.release(trajectory)
    assert trajectory.token_ids.tolist() == [1, 2]
    assert set(trajectory.strips) == {"plan"}


def test_unknown_sessions_are_named() -> None:
    store = store_of()
    trajectory, _ = run(store, [1, 2])
    assert store.get(trajectory.session_id) is trajectory
    with pytest.raises(UnknownSessionError, match=r"'nope'.*session-1"):
        store.get("nope")


def test_clear_spares_what_is_running() -> None:
    store = store_of()
    run(store, [1, 2])
    busy, _ = store.checkout([5, 6, 7], "shared")
    store.clear()
    assert store.trajectories == [busy]
