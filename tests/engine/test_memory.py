"""Invariant 7: the bytes reported are those held, and the budget is never exceeded, not even while a buffer grows."""

from __future__ import annotations

import gc
import random
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from precache import Engine
from precache.cache.layout import CacheLayout, StripLayout
from precache.cache.store import TrajectoryStore
from precache.cache.trajectory import Writer
from precache.errors import CacheBudgetError
from tests.engine.setup import AGENTS, Setup
from tests.engine.trajectories import METHODS, SELECTIVE_METHODS, STRIP_METHODS, play_engine, tokens

CPU = torch.device("cpu")


def bytes_reachable(root: object) -> int:
    """Bytes of all distinct tensor storages that an object refers to, found without its help."""
    seen: set[int] = set()
    storages: dict[int, int] = {}
    left = [root]
    while left:
        item = left.pop()
        if id(item) in seen or isinstance(item, type | types.FunctionType | types.ModuleType):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        else:
            left += gc.get_referents(item)
    return sum(storages.values())


@pytest.mark.parametrize("label", ["qkvo", "mixed", "shared_a"])
@pytest.mark.parametrize(("policy", "schedule"), METHODS)
def test_reported_bytes_are_the_bytes_held(
    llama: Setup, policy: str, schedule: str | None, label: str
) -> None:
    with llama.engine(policy, schedule, llama.adapters(label)) as engine, engine.no_idle_work():
        play_engine(engine)
        stream = engine.stream("plan", tokens(40, seed=3), max_tokens=3, ignore_eos=True)
        next(stream)
        held = bytes_reachable(engine.store)
        assert engine.stats().bytes_held == held > 0
        assert sum(session.bytes for session in engine.sessions()) == held
        stream.close()
        assert engine.stats().bytes_held == bytes_reachable(engine.store)


def test_a_low_rank_strip_costs_its_rank_and_no_more(llama: Setup) -> None:
    engine = llama.engine("prelrshared", growth_tokens=16)
    engine.score("plan", tokens(30), tokens(3))
    (session,) = engine.sessions()
    rows, layers, rank, float32 = 32, 4, 4, 4
    assert session.base_bytes == rows * layers * 2 * (2 * 16) * float32
    assert [strip.bytes for strip in session.strips] == [rows * layers * rank * float32] * 3


@pytest.mark.parametrize(("policy", "schedule"), METHODS)
def test_a_random_load_stays_within_the_budget(
    llama: Setup, policy: str, schedule: str | None
) -> None:
    rng = random.Random(1)
    budget = 400 * 1024
    trunks = [tokens(60, seed=i) for i in range(4)]
    with llama.engine(policy, schedule, cache_memory=budget, growth_tokens=8) as engine:
        streams = []
        for _ in range(25):
            trunk = rng.choice(trunks)[: rng.randrange(5, 60)]
            prompt = [*trunk, *tokens(rng.randrange(1, 20), seed=rng.randrange(3))]
            try:
                stream = engine.stream(rng.choice(AGENTS), prompt, max_tokens=4, ignore_eos=True)
                next(stream)
                streams.append(stream)
                if len(streams) > 2:
                    list(streams.pop(rng.randrange(3)))
            except CacheBudgetError:
                streams.clear()
            assert engine.stats().bytes_held <= budget
        for stream in streams:
            stream.close()
        stats = engine.stats()
    assert stats.peak_bytes <= budget
    assert stats.evictions > 0
    assert stats.reused_tokens > 0


class LiveBytes(TorchDispatchMode):
    """Sums the bytes of tensors that are alive, at every allocation."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        function: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and "empty" in function.__name__:
            self._live[id(result)] = result.untyped_storage().nbytes()
            weakref.finalize(result, self._live.pop, id(result), None)
            self.peak = max(self.peak, sum(self._live.values()))
        return result


@pytest.mark.parametrize("rank", [1, 40])
def test_the_peak_inside_growth_stays_within_the_budget(rank: int) -> None:
    rng = random.Random(2)
    layout = CacheLayout(3, 2, 8, torch.float32, CPU)
    strips = [StripLayout(name, (rank, 0, 2), (0, 3, 0)) for name in ("a", "b")]
    store = TrajectoryStore(layout, budget=120_000, growth_tokens=8)
    with LiveBytes() as live:
        for _ in range(150):
            prompt = [rng.randrange(2) for _ in range(3)] + list(range(rng.randrange(4, 90)))
            trajectory, matched = store.checkout(prompt, "shared")
            try:
                store.reserve(trajectory, len(prompt), strips, private=len(prompt) - matched)
                trajectory.commit(prompt[matched:], Writer("a", "1"))
                store.reserve(trajectory, len(prompt) + 30, strips, len(prompt) + 30 - matched)
            except CacheBudgetError:
                pass
            store.release(trajectory)
    assert 60_000 < live.peak <= store.budget
    assert store.evictions > 0


@pytest.mark.parametrize(("policy", "schedule"), [*STRIP_METHODS[1:-1], *SELECTIVE_METHODS])
@pytest.mark.parametrize("prompt", [31, 70])
def test_output_without_a_limit_fills_the_budget_and_not_more(
    llama: Setup, policy: str, schedule: str | None, prompt: int
) -> None:
    probe = llama.engine(policy, schedule)
    budget = probe._runner._bytes_needed(probe.bank.get("plan"), 96)
    probe.close()
    with llama.engine(policy, schedule, cache_memory=budget, growth_tokens=16) as engine:
        out = engine.generate("plan", tokens(prompt), ignore_eos=True)
        assert out.finish_reason == "length"
        assert prompt + len(out.token_ids) - 1 >= 96
        assert engine.stats().peak_bytes <= budget


def test_the_room_counts_the_largest_tensor_that_exists_twice(llama: Setup) -> None:
    """A strip wider than the keys of a layer: its copy decides what growing takes."""
    wide = {"plan": llama.other_adapter(3, rank=64)}
    probe: Engine = llama.engine(adapters=wide)
    budget = probe._runner._bytes_needed(probe.bank.get("plan"), 96)
    engine = llama.engine(adapters=wide, cache_memory=budget, growth_tokens=16)
    out = engine.generate("plan", tokens(10), ignore_eos=True)
    assert out.finish_reason == "length"
    assert engine.stats().peak_bytes <= budget
