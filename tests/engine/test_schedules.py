"""Invariant 3, first half: when the neutral pass of rebaseshared runs changes nothing but waiting times."""

from __future__ import annotations

import threading
import time

import pytest

from precache import Engine
from precache.engine.idle import IdleWorker
from tests.engine.faults import Fault, failing_layer
from tests.engine.setup import Setup
from tests.engine.trajectories import (
    NOTICEABLE,
    SCHEDULES,
    STEPS,
    TOLERANCE,
    answer,
    difference,
    only_trajectory,
    play_engine,
    play_reference,
    stored,
    stored_difference,
    tokens,
)

IDLE = "idle-lazy-prefill"


def pending(engine: Engine) -> int:
    return sum(session.pending_tokens for session in engine.sessions())


def wait_until_idle(engine: Engine, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while pending(engine):
        assert time.monotonic() < deadline, f"{pending(engine)} tokens are still pending"
        time.sleep(0.001)


@pytest.mark.parametrize("label", ["qv", "qkvo"])
def test_all_schedules_reach_the_same_state(llama: Setup, label: str) -> None:
    states = []
    for schedule in SCHEDULES:
        with llama.engine("rebaseshared", schedule, llama.adapters(label)) as engine:
            assert play_engine(engine).cached[-1] > 0
            wait_until_idle(engine)
            states.append(stored(engine, only_trajectory(engine)))
    lazy, double, idle = states
    assert stored_difference(lazy, double) < TOLERANCE
    assert stored_difference(lazy, idle) < TOLERANCE
    adapted = llama.engine("prelrshared", adapters=llama.adapters(label))
    play_engine(adapted)
    other = stored(adapted, only_trajectory(adapted))
    assert difference([lazy["k.3"]], [other["k.3"]]) > NOTICEABLE


@pytest.mark.parametrize("how", ["score", "generate", "closed stream"])
def test_pending_tokens_are_run_while_the_engine_is_idle(llama: Setup, how: str) -> None:
    with llama.engine("rebaseshared", IDLE, prefill_chunk=4) as engine:
        with engine.no_idle_work():
            if how == "score":
                engine.score("plan", tokens(20), tokens(3))
            elif how == "generate":
                engine.generate("plan", tokens(20), max_tokens=3, ignore_eos=True)
            else:
                stream = engine.stream("plan", tokens(20), max_tokens=3, ignore_eos=True)
                next(stream)
                stream.close()
            assert pending(engine) >= 20
        wait_until_idle(engine)
        assert engine.sessions()[0].length >= 20


def test_a_request_that_comes_first_finishes_the_neutral_pass_and_reports_the_wait(
    llama: Setup,
) -> None:
    state = llama.reference("rebaseshared")
    with llama.engine("rebaseshared", IDLE) as engine, engine.no_idle_work():
        first = engine.generate("plan", tokens(20), max_tokens=4, ignore_eos=True)
        answer(state, "plan", tokens(20), first.token_ids)
        prompt = [*tokens(20), *first.token_ids, *tokens(3, seed=1)]
        second = engine.generate("action", prompt, max_tokens=1)
        after = [*prompt, *second.token_ids, *tokens(2)]
        logits = engine.score("reflect", after, tokens(2))
    assert first.timings.neutral_wait_s < first.timings.ttft_s
    assert 0 < second.timings.neutral_wait_s < second.timings.ttft_s
    assert second.usage.cached_tokens == 23
    answer(state, "action", prompt, second.token_ids)
    assert difference([logits], [answer(state, "reflect", after, tokens(2))]) < TOLERANCE


def test_lazy_prefill_runs_after_the_turn_and_leaves_nothing_pending(llama: Setup) -> None:
    engine = llama.engine("rebaseshared", "lazy-prefill")
    out = engine.generate("plan", tokens(20), max_tokens=4, ignore_eos=True)
    assert pending(engine) == 0
    assert out.usage.neutral_tokens == 23
    assert out.timings.neutral_s > 0


def test_double_batch_runs_beside_the_turn_and_frees_its_private_rows(llama: Setup) -> None:
    engine = llama.engine("rebaseshared", "double-batch")
    stream = engine.stream("plan", tokens(20), max_tokens=4, ignore_eos=True)
    next(stream)
    during = engine.stats().bytes_held
    last = [chunk.output for chunk in stream][-1]
    assert last is not None
    assert last.usage.neutral_tokens == 23
    assert last.timings.neutral_s == 0
    assert engine.stats().bytes_held < during


def test_a_request_on_another_trajectory_does_not_wait_for_pending_work(llama: Setup) -> None:
    with llama.engine("rebaseshared", IDLE, prefill_chunk=16) as engine, engine.no_idle_work():
        engine.score("plan", tokens(200), tokens(1))
        out = engine.generate("action", tokens(30, seed=9), max_tokens=1)
        assert engine.sessions()[0].pending_tokens == 200
        assert out.usage.neutral_tokens == 0
        assert engine.idle_step()
        assert engine.sessions()[0].pending_tokens == 184


def test_work_that_waited_for_the_lock_gives_way_to_a_request_that_came_meanwhile(
    llama: Setup,
) -> None:
    with llama.engine("rebaseshared", IDLE, prefill_chunk=1) as engine:
        for seed in range(10):
            engine.score("plan", tokens(4, seed), tokens(1))
            time.sleep(0.002)  # the worker is in a pass, or about to start one
            with engine.no_idle_work():
                before = pending(engine)
                time.sleep(0.002)
                assert (
                    before - pending(engine) <= 1
                )  # at most the pass that ran when the hold began


def test_work_that_a_request_leaves_during_a_step_is_not_forgotten() -> None:
    calls: list[int] = []

    def step() -> bool:
        calls.append(0)
        if len(calls) == 1:  # a whole request, before the worker has noted that nothing is left
            worker.hold()
            worker.unhold()
        return False

    worker = IdleWorker(step)
    worker.hold()
    worker.unhold()
    deadline = time.monotonic() + 10
    while len(calls) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    worker.stop()
    assert len(calls) == 2


def test_closing_ends_the_idle_thread(llama: Setup) -> None:
    def running() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "precache-idle"}

    before = running()
    engine = llama.engine("rebaseshared", IDLE)
    assert len(running() - before) == 1
    engine.close()
    engine.close()
    assert running() == before


def test_a_neutral_pass_that_fails_while_idle_drops_its_rows_and_no_more(llama: Setup) -> None:
    state = llama.reference("rebaseshared")
    play_reference(state, STEPS[:2])
    state.truncate(4)
    with llama.engine("rebaseshared", IDLE, prefill_chunk=4) as engine, engine.no_idle_work():
        played = play_engine(engine, STEPS[:1])
        with failing_layer(engine, call=2):
            assert engine.idle_step()
            with pytest.raises(Fault):
                engine.idle_step()
        assert engine.sessions()[0].length == 4
        prompt = [*played.token_ids, *tokens(3, seed=8)]
        logits = engine.score("reflect", prompt, tokens(2))
        assert engine.stats().reused_tokens == 4
    assert difference([logits], [answer(state, "reflect", prompt, tokens(2))]) < TOLERANCE
