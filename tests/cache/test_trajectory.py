"""The buffers of one trajectory: growth, truncation, strips' coverage, and honest byte counts."""

from __future__ import annotations

import pytest
import torch

from precache.cache.layout import CacheLayout, StripLayout
from precache.cache.trajectory import Strip, Trajectory, Writer, WriterRun, storage_bytes

LAYOUT = CacheLayout(2, 2, 4, torch.float32, torch.device("cpu"))
STRIP = StripLayout("plan", v_ranks=(3, 0), k_ranks=(0, 2))
PLAN, ACT = Writer("plan", "d1"), Writer("act", "d2")


def filled(length: int, capacity: int = 16) -> Trajectory:
    trajectory = Trajectory(LAYOUT, "shared", "session-1")
    trajectory.grow(capacity)
    trajectory.add_strip(STRIP)
    for tensor in trajectory.tensors():
        tensor.copy_(torch.randn(tensor.shape))
    trajectory.commit(list(range(length)), PLAN)
    trajectory.strips["plan"].cover(0, length)
    return trajectory


def test_growing_keeps_the_valid_rows() -> None:
    trajectory = filled(5)
    before = [tensor.clone() for tensor in trajectory.tensors()]
    trajectory.grow(64)
    after = list(trajectory.tensors())
    assert trajectory.capacity == 64
    assert trajectory.token_ids.tolist() == [0, 1, 2, 3, 4]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old[..., :5, :], new[..., :5, :])


def test_growth_is_announced_with_the_bytes_it_takes_and_copies() -> None:
    trajectory = filled(5)
    held, announced = trajectory.bytes_held(), trajectory.growth_bytes(64)
    largest = max(tensor.nbytes for tensor in trajectory.tensors())
    assert trajectory.copied_bytes(64) == largest
    trajectory.grow(64)
    assert trajectory.bytes_held() - held == announced


def test_bytes_held_are_the_bytes_of_its_storages() -> None:
    trajectory = filled(5, capacity=16)
    per_token = 2 * 2 * 2 * 4 + 3 + 2
    assert trajectory.bytes_held() == 16 * per_token * 4
    assert LAYOUT.base_bytes_per_token == 2 * 2 * 2 * 4 * 4


def test_views_of_one_storage_count_once() -> None:
    storage = torch.zeros(10)
    assert storage_bytes(iter([storage[:5], storage[5:], storage])) == 40


def test_truncate_to_nothing_empties_the_view() -> None:
    trajectory = filled(5)
    trajectory.truncate(0)
    assert trajectory.length == 0
    assert trajectory.runs == []
    assert trajectory.strips["plan"].covered == []


@pytest.mark.parametrize("length", [-1, 6])
def test_truncate_outside_the_trajectory_raises(length: int) -> None:
    with pytest.raises(ValueError, match="allowed is 0 to 5"):
        filled(5).truncate(length)


def test_writers_are_recorded_as_runs() -> None:
    trajectory = filled(3)
    trajectory.commit([7, 8], ACT)
    trajectory.commit([9], ACT)
    assert trajectory.runs == [WriterRun(0, 3, PLAN), WriterRun(3, 6, ACT)]
    trajectory.truncate(4)
    assert trajectory.runs == [WriterRun(0, 3, PLAN), WriterRun(3, 4, ACT)]


def test_truncation_in_the_pending_part_keeps_the_rest_pending() -> None:
    trajectory = filled(8)
    trajectory.pending_from = 4
    trajectory.truncate(6)
    assert trajectory.pending_from == 4
    trajectory.truncate(4)
    assert trajectory.pending_from is None


def test_a_copy_shares_no_memory_with_its_source() -> None:
    source = filled(6)
    source.pending_from = 2
    copy = Trajectory(LAYOUT, "shared", "session-2")
    copy.grow(16)
    copy.copy_prefix(source, 4)
    before = [tensor.clone() for tensor in source.tensors()]
    assert torch.equal(copy.base.k[1][:, :4], source.base.k[1][:, :4])
    assert torch.equal(copy.strips["plan"].v[0][:4], source.strips["plan"].v[0][:4])  # type: ignore[index]
    for tensor in copy.tensors():
        tensor.zero_()
    assert all(torch.equal(a, b) for a, b in zip(before, source.tensors(), strict=True))
    assert copy.length == 4
    assert copy.pending_from == 2
    assert copy.strips["plan"].covered == [(0, 4)]
    assert source.length == 6


def test_a_strip_knows_its_gaps() -> None:
    strip = Strip(STRIP, LAYOUT, 32)
    assert strip.missing(8) == [(0, 8)]
    strip.cover(4, 8)
    strip.cover(10, 12)
    assert strip.missing(16) == [(0, 4), (8, 10), (12, 16)]
    strip.cover(8, 10)
    assert strip.covered == [(4, 12)]
    strip.truncate(6)
    assert strip.covered == [(4, 6)]
    assert strip.missing(6) == [(0, 4)]
    strip.cover(0, 4)
    assert strip.missing(6) == []


def test_a_strip_forgets_a_range_and_keeps_the_rest() -> None:
    strip = Strip(StripLayout("plan"), LAYOUT, 16)
    strip.cover(2, 9)
    strip.cover(11, 14)
    strip.uncover(4, 12)
    assert strip.covered == [(2, 4), (12, 14)]
    assert strip.missing(14) == [(0, 2), (4, 12)]
    assert list(strip.tensors()) == []


def test_hidden_states_grow_and_are_counted_as_strips_are() -> None:
    trajectory = filled(5)
    held = trajectory.bytes_held()
    strip = trajectory.add_strip(StripLayout("hidden", h_widths=(0, 6)))
    assert trajectory.bytes_held() - held == 16 * 6 * 4
    (hidden,) = strip.tensors()
    hidden.copy_(torch.randn(16, 6))
    trajectory.grow(64)
    assert strip.hidden[0] is None
    assert torch.equal(strip.hidden[1][:5], hidden[:5])  # type: ignore[index]


def test_rows_are_written_where_they_lie() -> None:
    trajectory = filled(8)
    before = trajectory.base.k[1].clone()
    rows, new = torch.tensor([1, 4, 5]), torch.randn(2, 3, 4)
    trajectory.base.write(1, rows, new, new)
    assert torch.equal(trajectory.base.k[1][:, rows], new)
    others = torch.tensor([0, 2, 3, 6, 7])
    assert torch.equal(trajectory.base.k[1][:, others], before[:, others])


def test_private_rows_start_where_the_turn_starts() -> None:
    trajectory = filled(5)
    private = trajectory.open_private(8)
    private.write(0, slice(5, 7), torch.ones(2, 2, 4), torch.zeros(2, 2, 4))
    k, v = private.read(0, 7)
    assert k.shape == (2, 2, 4)
    assert bool((k == 1).all())
    assert bool((v == 0).all())
    trajectory.commit([5, 6], PLAN)
    assert trajectory.open_private(32) is private
    assert bool((private.read(0, 7)[0] == 1).all())
