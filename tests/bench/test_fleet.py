"""The fleet simulation: what routing, eviction and offload must do to reuse, in cases that can be said beforehand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from precache.bench.fleet import Fleet, Load, Outcome, Rates, simulate
from precache.bench.physics import METHODS, LoraSize, ModelSize, bytes_per_token
from precache.bench.shapes import model_config
from precache.bench.trace import Step, Trace, controlled_trace
from precache.errors import ConfigError

SIZE = ModelSize.of(model_config("llama-3.1-8b"))
LORA = LoraSize(3)
TRACE = controlled_trace(1000, ("plan", "action", "reflect"))
RATES = Rates(flops=3e14, read_bytes=2e12)
LOAD = Load(TRACE, trajectories=6, finished=30, think_s=0.5)
ROOMY = Fleet(replicas=3, cache_bytes=10**12)


def run(policy: str, fleet: Fleet = ROOMY, load: Load = LOAD, rates: Rates = RATES) -> Outcome:
    return simulate(SIZE, LORA, METHODS[policy], fleet, load, rates)


def test_one_trajectory_reuses_all_but_what_is_new():
    trace = Trace((Step("plan", 100, 5), Step("action", 10, 5)) * 2)
    outcome = run("prelrshared", Fleet(1, 10**12), Load(trace, trajectories=1, finished=5))
    prompts = 100 + 115 + 220 + 235
    assert outcome.reused == pytest.approx((104 + 119 + 224) / prompts)
    alone = run("nonshared", Fleet(1, 10**12), Load(trace, trajectories=1, finished=5))
    assert alone.reused == pytest.approx((0 + 0 + 104 + 119) / prompts)


def test_sharing_reuses_more_and_answers_sooner():
    shared, own = run("prelrshared"), run("nonshared")
    assert shared.reused > own.reused
    assert shared.ttft_p90_s < own.ttft_p90_s
    assert shared.turns_per_s > own.turns_per_s


def test_a_replica_for_each_adapter_helps_no_shared_cache():
    by_trajectory = run("prelrshared")
    by_adapter = run("prelrshared", replace(ROOMY, routing="adapter"))
    anywhere = run("prelrshared", replace(ROOMY, routing="random"))
    assert by_trajectory.reused > by_adapter.reused
    assert by_trajectory.reused > anywhere.reused
    # An own cache loses nothing where every adapter has its replica.
    assert run("nonshared", replace(ROOMY, routing="adapter")).reused == run("nonshared").reused


def test_what_does_not_fit_is_evicted_and_comes_back_from_storage():
    one = TRACE.tokens * bytes_per_token(SIZE, LORA, METHODS["prelrshared"], 2)
    tight = replace(ROOMY, cache_bytes=one)
    assert run("prelrshared").evictions == 0
    lost = run("prelrshared", tight)
    assert lost.evictions > 0
    assert lost.reused < run("prelrshared").reused
    kept = run("prelrshared", tight, rates=replace(RATES, offload_bytes=2e10))
    assert kept.reused == run("prelrshared").reused
    assert kept.ttft_p90_s < lost.ttft_p90_s


def test_the_same_seed_gives_the_same_outcome():
    anywhere = replace(ROOMY, routing="random")
    assert run("prelrshared", anywhere) == run("prelrshared", anywhere)
    assert run("prelrshared", anywhere) != run("prelrshared", anywhere, replace(LOAD, seed=1))


def test_what_is_not_modelled_is_refused():
    with pytest.raises(ConfigError, match="method: got 'catch_up'"):
        run("baseshared")
    with pytest.raises(ConfigError, match="routing: got 'nearest'"):
        Fleet(1, 1, "nearest")
    with pytest.raises(ConfigError, match="replicas: got 0"):
        Fleet(0, 1)
