"""Invariant 6: whatever ends a turn early, the cache afterwards is a valid prefix and the next turns are right."""

from __future__ import annotations

from contextlib import suppress

import pytest

from precache import Engine
from precache.errors import CacheBudgetError, NonFiniteLogitsError
from tests.engine.faults import Fault, failing_layer, nan_logits
from tests.engine.setup import Setup
from tests.engine.trajectories import (
    METHODS,
    SELECTIVE,
    STEPS,
    TOLERANCE,
    UNCHANGING,
    answer,
    difference,
    play_engine,
    play_reference,
    stored,
    tokens,
    turn,
)
from tests.reference.policies import ReferenceState

NEW = tokens(6, seed=21)


def snapshot(engine: Engine) -> list[dict[str, object]]:
    return [
        {name: tensor.tolist() for name, tensor in stored(engine, item).items()}
        for item in engine.store.trajectories
    ]


def assert_goes_on(
    engine: Engine, state: ReferenceState, prompt: list[int], agent: str, cached: int
) -> None:
    """The engine holds what the reference holds after ``agent`` wrote up to ``cached``; the next turns are right."""
    assert not any(session.busy for session in engine.sessions())
    state.catch_up(None if agent == "base" else agent, min(cached, len(state.tokens)))
    if cached > len(state.tokens):
        turn(state, agent, prompt[len(state.tokens) : cached])
    state.truncate(min(cached, len(state.tokens)))
    for reader, seed in (("reflect", 31), (agent, 32)):
        prompt = [*prompt, *tokens(3, seed)]
        before = engine.stats().reused_tokens
        logits = engine.score(reader, prompt, tokens(2, seed))
        assert engine.stats().reused_tokens > before
        assert difference([logits], [answer(state, reader, prompt, tokens(2, seed))]) < TOLERANCE
        prompt = [*prompt, *tokens(2, seed)]


def cached_of(engine: Engine, prompt: list[int]) -> int:
    """How much of a prompt is cached in the longest session."""
    lengths = [sum(1 for _ in _common(session.token_ids, prompt)) for session in engine.sessions()]
    return max(lengths)


def _common(one: tuple[int, ...], other: list[int]) -> list[int]:
    found = []
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        found.append(a)
    return found


# Passes of the turn below: prefill 2 (chunks of 4), decode 2, then the deferred pass of lazy-prefill 2. Under
# baseshared a catch-up of the tokens that others wrote comes first.
CALLS = [(*method, call) for method in METHODS for call in (1, 2, 4)] + [
    ("rebaseshared", "lazy-prefill", call) for call in (5, 6)
]


@pytest.mark.parametrize(("policy", "schedule", "call"), CALLS)
def test_a_pass_that_fails_in_the_middle(
    llama: Setup, policy: str, schedule: str | None, call: int
) -> None:
    state = llama.reference(policy)
    play_reference(state, STEPS[:3])
    with llama.engine(policy, schedule, prefill_chunk=4) as engine:
        prompt = [*play_engine(engine, STEPS[:3]).token_ids, *NEW]
        with engine.no_idle_work(), failing_layer(engine, call), pytest.raises(Fault):
            list(engine.stream("action", prompt, max_tokens=3, ignore_eos=True))
        longest = max(engine.sessions(), key=lambda session: session.length)
        known = list(longest.token_ids)
        prompt = [*known, *prompt[len(known) :]]
        assert_goes_on(engine, state, prompt, "action", len(known))


@pytest.mark.parametrize("after", [1, 2, 4])
@pytest.mark.parametrize(("policy", "schedule"), METHODS)
def test_a_stream_that_is_closed(
    llama: Setup, policy: str, schedule: str | None, after: int
) -> None:
    state = llama.reference(policy)
    play_reference(state, STEPS[:3])
    with llama.engine(policy, schedule) as engine:
        prompt = [*play_engine(engine, STEPS[:3]).token_ids, *NEW]
        stream = engine.stream("action", prompt, max_tokens=9, ignore_eos=True)
        said = [next(stream).token_ids[0] for _ in range(after)]
        stream.close()
        prompt = [*prompt, *said]
        assert_goes_on(engine, state, prompt, "action", len(prompt) - 1)


@pytest.mark.parametrize("call", [1, 3])
@pytest.mark.parametrize(("policy", "schedule"), METHODS)
def test_nan_logits_end_the_turn_and_nothing_of_it_is_kept(
    llama: Setup, policy: str, schedule: str | None, call: int
) -> None:
    state = llama.reference(policy)
    play_reference(state, STEPS[:3])
    with llama.engine(policy, schedule) as engine:
        prompt = [*play_engine(engine, STEPS[:3]).token_ids, *NEW]
        before = {session.session_id: session.length for session in engine.sessions()}
        with (
            nan_logits(engine, call),
            pytest.raises(NonFiniteLogitsError, match="'action' produced non-finite logits"),
        ):
            engine.generate("action", prompt, max_tokens=5, ignore_eos=True)
        if policy in SELECTIVE:  # the rows that it refreshed are dropped, with what follows
            before = dict.fromkeys(before, 26)
            state.truncate(26)
        assert {session.session_id: session.length for session in engine.sessions()} == before
        assert_goes_on(engine, state, prompt[: len(state.tokens)], "action", len(state.tokens))


@pytest.mark.parametrize(("policy", "schedule"), UNCHANGING)
def test_an_adapter_that_overflows_harms_nobody_else(
    llama: Setup, policy: str, schedule: str | None
) -> None:
    state = llama.reference(policy)
    play_reference(state, STEPS[:3])
    adapters = llama.adapters() | {"broken": llama.other_adapter(5, std=1e37)}
    with llama.engine(policy, schedule, adapters) as engine:
        prompt = play_engine(engine, STEPS[:3]).token_ids
        for _ in range(2):
            with pytest.raises(NonFiniteLogitsError, match="'broken'"):
                engine.generate("broken", [*prompt, *NEW], max_tokens=5)
        assert_goes_on(engine, state, prompt, "action", len(state.tokens))


@pytest.mark.parametrize(("policy", "schedule"), METHODS)
def test_a_request_over_the_budget_changes_nothing(
    llama: Setup, policy: str, schedule: str | None
) -> None:
    probe = llama.engine(policy, schedule)
    budget = probe._runner._bytes_needed(probe.bank.get("plan"), 128)
    probe.close()
    with llama.engine(policy, schedule, cache_memory=budget) as engine, engine.no_idle_work():
        engine.score("plan", tokens(60), tokens(2))
        before = snapshot(engine)
        with pytest.raises(CacheBudgetError, match=f"the budget is {budget} bytes"):
            engine.generate("plan", [*tokens(60), *tokens(100)], max_tokens=1)
        with pytest.raises(CacheBudgetError):
            engine.generate("plan", tokens(60), max_tokens=100)
        assert snapshot(engine) == before
        assert engine.generate("plan", tokens(62), max_tokens=3).usage.cached_tokens >= 60


def test_a_turn_that_finds_no_room_beside_another_leaves_both_right(llama: Setup) -> None:
    probe = llama.engine()
    budget = probe._runner._bytes_needed(probe.bank.get("plan"), 128)
    engine = llama.engine(cache_memory=budget)
    stream = engine.stream("plan", tokens(60), max_tokens=40, ignore_eos=True, logprobs=20)
    next(stream)
    with pytest.raises(CacheBudgetError, match="held by running requests"):
        engine.generate("action", tokens(70, seed=2), max_tokens=1)
    output = [chunk.output for chunk in stream][-1]
    assert output is not None
    alone = llama.engine().generate("plan", tokens(60), max_tokens=40, ignore_eos=True)
    assert output.token_ids == alone.token_ids
    with suppress(CacheBudgetError):
        engine.generate("action", tokens(70, seed=2), max_tokens=1)
    assert engine.stats().bytes_held <= budget
