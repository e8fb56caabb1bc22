"""Invariant 5: adapters that come, go and change under a warm cache, also while a turn runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from torch import Tensor

from precache import Engine
from precache.engine.policies import make_policy
from precache.errors import AdapterExistsError, UnknownAdapterError
from tests.engine.setup import Setup
from tests.engine.trajectories import (
    METHODS,
    NOTICEABLE,
    REUSED,
    SELECTIVE,
    SHARED_METHODS,
    STEPS,
    TOLERANCE,
    Step,
    answer,
    difference,
    logprob_difference,
    only_trajectory,
    play_engine,
    play_reference,
    script,
    stored,
    stored_difference,
    tokens,
)
from tests.reference.lora import read_adapter

# Under policies with a neutral base (or none that is shared) what other weights wrote stays.
NEUTRAL = ("nonshared", "rebaseshared")


def two_of_three(setup: Setup) -> dict[str, Path]:
    return {name: path for name, path in setup.adapters().items() if name != "reflect"}


def play_from(engine: Engine, start: int) -> list[Tensor]:
    """The turns of STEPS from ``start`` on; the ones before have been played."""
    prompt: list[int] = []
    logits = []
    for index, (agent, new, output) in enumerate(script(STEPS)):
        prompt += new
        if index >= start:
            logits.append(engine.score(agent, prompt, output))
        prompt += output
    return logits


@pytest.mark.parametrize(("policy", "schedule"), METHODS)
def test_an_adapter_that_comes_later_is_caught_up(
    llama: Setup, policy: str, schedule: str | None
) -> None:
    reflect = llama.adapters()["reflect"]
    state = llama.reference(policy, two_of_three(llama))
    play_reference(state, STEPS[:2])
    with llama.engine(policy, schedule, two_of_three(llama)) as engine:
        played = play_engine(engine, STEPS[:2])
        engine.add_adapter("reflect", reflect)
        prompt = [*played.token_ids, *tokens(5, seed=3)]
        out = engine.generate("reflect", prompt, max_tokens=1)
        again = [*prompt, *tokens(3, seed=4)]
        logits = engine.score("reflect", again, tokens(2, seed=5))
        caught_up = engine.generate("reflect", again, max_tokens=1).usage.catch_up_tokens

    state.add_adapter("reflect", read_adapter(reflect))
    answer(state, "reflect", prompt, out.token_ids)
    assert difference([logits], [answer(state, "reflect", again, tokens(2, seed=5))]) < TOLERANCE
    assert out.usage.cached_tokens == (0 if policy == "nonshared" else 26)
    if schedule != "idle-lazy-prefill":  # there the pending pass fills a part
        assert out.usage.catch_up_tokens == (26 if (policy, schedule) in METHODS[2:] else 0)
    assert caught_up == 0


@pytest.mark.parametrize("schedule", ["lazy-prefill", "double-batch"])
def test_under_a_neutral_base_a_later_adapter_misses_nothing(llama: Setup, schedule: str) -> None:
    with llama.engine("rebaseshared", schedule, two_of_three(llama)) as engine:
        play_engine(engine, STEPS[:2])
        engine.add_adapter("reflect", llama.adapters()["reflect"])
        logits = play_from(engine, 2)
        assert engine.stats().reused_tokens == sum(REUSED)
    assert difference(logits, llama.expected("rebaseshared")[2:]) < TOLERANCE


def test_under_an_adapted_base_only_what_came_before_is_caught_up(llama: Setup) -> None:
    """Later turns fill the strip of the newcomer, so its own pass covers the gap in front and no more."""
    steps = (*STEPS[:2], Step("plan", 3, 2), Step("action", 4, 3))
    always, late = (
        llama.engine("prelrshared"),
        llama.engine("prelrshared", None, two_of_three(llama)),
    )
    play_engine(always, steps)
    played = play_engine(late, STEPS[:2])
    late.add_adapter("reflect", llama.adapters()["reflect"])
    rest = script(steps)[2:]
    prompt = played.token_ids
    for agent, new, output in rest:
        prompt = [*prompt, *new]
        late.score(agent, prompt, output)
        prompt = [*prompt, *output]
    trajectory = only_trajectory(late)
    (key,) = (strip.key for strip in late.sessions()[0].strips if strip.readers == ("reflect",))
    assert trajectory.strips[key].covered == [(26, 38)]
    written = only_trajectory(always).strips[key].v[1][26:38]  # type: ignore[index]
    assert difference([trajectory.strips[key].v[1][26:38]], [written]) < TOLERANCE  # type: ignore[index]
    assert late.generate("reflect", prompt, max_tokens=1).usage.catch_up_tokens == 26
    assert trajectory.strips[key].covered[0][0] == 0


@pytest.mark.parametrize("how", ["replace", "remove and add"])
@pytest.mark.parametrize(("policy", "schedule"), METHODS)
def test_new_weights_under_an_old_name(
    llama: Setup, policy: str, schedule: str | None, how: str
) -> None:
    other = llama.other_adapter()
    state = llama.reference(policy)
    play_reference(state, STEPS[:3])
    with llama.engine(policy, schedule) as engine:
        played = play_engine(engine, STEPS[:3])
        if how == "replace":
            engine.replace_adapter("action", other)
        else:
            engine.remove_adapter("action")
            engine.add_adapter("action", other)
        state.add_adapter("action", read_adapter(other))
        prompt, hits = played.token_ids, []
        for agent, seed in (("action", 1), ("plan", 2), ("reflect", 3)):
            prompt = [*prompt, *tokens(4, seed)]
            before = engine.stats().reused_tokens
            logits = engine.score(agent, prompt, tokens(3, seed))
            hits.append(engine.stats().reused_tokens - before)
            assert difference([logits], [answer(state, agent, prompt, tokens(3, seed))]) < TOLERANCE
            prompt = [*prompt, *tokens(3, seed)]
    if policy == "nonshared":
        assert hits == [0, 21, 36]
    elif policy in SELECTIVE:  # the old weights had refreshed what plan wrote
        assert hits == [0, 43, 50]
    else:
        assert hits == ([36] if policy in NEUTRAL else [21]) + [43, 50]


@pytest.mark.parametrize(("policy", "schedule"), METHODS)
def test_the_same_weights_again_change_nothing(
    llama: Setup, policy: str, schedule: str | None
) -> None:
    with llama.engine(policy, schedule) as engine, engine.no_idle_work():
        play_engine(engine, STEPS[:3])
        sessions = engine.sessions()
        engine.replace_adapter("action", llama.adapters()["action"])
        engine.add_adapter("plan", llama.adapters()["plan"])
        assert engine.sessions() == sessions


def test_a_name_that_is_taken_or_unknown_is_refused_and_nothing_changes(llama: Setup) -> None:
    engine = llama.engine()
    play_engine(engine, STEPS[:3])
    sessions = engine.sessions()
    with pytest.raises(AdapterExistsError, match="'plan'"):
        engine.add_adapter("plan", llama.other_adapter())
    with pytest.raises(UnknownAdapterError, match="'nobody'.*'plan'"):
        engine.replace_adapter("nobody", llama.other_adapter())
    with pytest.raises(UnknownAdapterError, match="'nobody'"):
        engine.remove_adapter("nobody")
    assert engine.sessions() == sessions


@pytest.mark.parametrize(("policy", "schedule"), METHODS)
def test_a_running_turn_keeps_the_weights_it_started_with(
    llama: Setup, policy: str, schedule: str | None
) -> None:
    other = llama.other_adapter()
    before, after = llama.reference(policy), llama.reference(policy)
    prompt = tokens(20)
    with llama.engine(policy, schedule) as engine:
        engine.score("plan", prompt[:9], prompt[9:11])
        stream = engine.stream("action", prompt, max_tokens=5, ignore_eos=True, logprobs=20)
        next(stream)
        engine.replace_adapter("action", other)
        engine.add_adapter("critic", llama.other_adapter(78))
        engine.remove_adapter("reflect")
        output = [chunk.output for chunk in stream][-1]
        assert output is not None
        later = [*prompt, *output.token_ids, *tokens(2)]
        logits = {
            agent: engine.score(agent, later, tokens(3, seed=6)) for agent in ("action", "critic")
        }
    answer(before, "plan", prompt[:9], prompt[9:11])
    expected = answer(before, "action", prompt, output.token_ids)
    assert logprob_difference(output, expected) < TOLERANCE
    answer(after, "plan", prompt[:9], prompt[9:11])
    if policy in ("rebaseshared", *SELECTIVE):  # the neutral base stays; what was refreshed goes
        answer(after, "action", prompt, output.token_ids)
    after.add_adapter("action", read_adapter(other))
    expected = answer(after, "action", later, tokens(3, seed=6))
    assert difference([logits["action"]], [expected]) < TOLERANCE
    assert logits["critic"].isfinite().all()
    assert float((logits["critic"] - logits["action"]).abs().max()) > NOTICEABLE


@pytest.mark.parametrize(("policy", "schedule"), SHARED_METHODS)
def test_a_turn_that_starts_after_a_change_has_the_new_weights(
    llama: Setup, policy: str, schedule: str | None
) -> None:
    other = llama.other_adapter()
    with llama.engine(policy, schedule) as engine:
        stream = engine.stream("action", tokens(20), max_tokens=2, ignore_eos=True)
        engine.replace_adapter("action", other)
        ids: Sequence[int] = [token for chunk in stream for token in chunk.token_ids]
        gone = engine.stream("reflect", tokens(20), max_tokens=2)
        engine.remove_adapter("reflect")
        with pytest.raises(UnknownAdapterError, match="'reflect'"):
            next(gone)
    new = llama.adapters() | {"action": other}
    with llama.engine(policy, schedule, new) as engine:
        expected = engine.generate("action", tokens(20), max_tokens=2, ignore_eos=True)
    assert tuple(ids) == expected.token_ids


def test_a_strip_of_other_weights_is_dropped_and_the_neutral_base_kept(llama: Setup) -> None:
    with llama.engine("rebaseshared") as engine:
        play_engine(engine, STEPS[:3])
        before = stored(engine, only_trajectory(engine))
        keys = {strip.key for strip in engine.sessions()[0].strips}
        engine.replace_adapter("action", llama.other_adapter())
        after = stored(engine, only_trajectory(engine))
        base = [name for name in before if name.startswith(("k.", "v."))]
        kept = {name: before[name] for name in before if not name.startswith("action")}
        assert stored_difference(after, kept) == 0
        assert set(base) < set(kept)
        assert len(keys - {strip.key for strip in engine.sessions()[0].strips}) == 1


def test_every_policy_says_whether_its_base_is_neutral() -> None:
    assert make_policy("rebaseshared").base_is_neutral
    assert not make_policy("prelrshared").base_is_neutral
