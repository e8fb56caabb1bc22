"""`blend`: the base is a mix of neutral and adapted, against the reference; its ends, its schedules, its settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from precache import EngineConfig
from precache.errors import CacheFileError, ConfigError, UnknownPolicyError
from tests.engine.faults import Fault, failing_layer
from tests.engine.setup import Setup
from tests.engine.trajectories import (
    NOTICEABLE,
    REUSED,
    STEPS,
    TOLERANCE,
    answer,
    difference,
    only_trajectory,
    other_than,
    play_engine,
    play_reference,
    stored,
    stored_by_reference,
    stored_difference,
    tokens,
)
from tests.reference.lora import read_adapter

SCHEDULES = ("lazy-prefill", "idle-lazy-prefill")
WEIGHTS = (0.25, 0.5, 0.0, 1.0)


@pytest.mark.parametrize("chunk", [512, 3])
@pytest.mark.parametrize("label", ["qv", "qkvo", "mixed"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_logits_and_caches_follow_the_definition(
    llama: Setup, schedule: str, label: str, chunk: int
) -> None:
    adapters = llama.adapters(label)
    state = llama.reference("blend", adapters, weights=WEIGHTS)
    with llama.engine(
        "blend", schedule, adapters, blend_weight=WEIGHTS, prefill_chunk=chunk
    ) as engine:
        played = play_engine(engine)
        while engine.idle_step():
            pass
        ours = stored(engine, only_trajectory(engine))
    assert difference(played.logits, play_reference(state)) < TOLERANCE
    assert stored_difference(ours, stored_by_reference(state.caches())) < TOLERANCE
    for other in ("rebaseshared", "prelrshared"):
        assert difference(played.logits, llama.expected(other, label)) > NOTICEABLE
    assert played.cached == REUSED


def test_a_weight_of_one_is_rebaseshared(llama: Setup) -> None:
    played = play_engine(llama.engine("blend", blend_weight=1))
    assert difference(played.logits, llama.expected("rebaseshared")) < TOLERANCE
    assert played.cached == REUSED


def test_a_prompt_that_turns_off_and_a_new_token_follow_the_definition(llama: Setup) -> None:
    state = llama.reference("blend", weights=WEIGHTS)
    play_reference(state)
    state.truncate(19)
    engine = llama.engine("blend", blend_weight=WEIGHTS)
    ids = play_engine(engine).token_ids
    prompt = [*ids[:19], other_than(ids[19])]
    for agent, output in (("action", tokens(3, seed=6)), ("plan", tokens(1, seed=7))):
        logits = engine.score(agent, prompt, output)
        assert difference([logits], [answer(state, agent, prompt, output)]) < TOLERANCE
        prompt = [*prompt, *output, 30]
    assert engine.stats().reused_tokens > sum(REUSED) + 19


def test_what_old_weights_wrote_goes_because_the_base_is_not_neutral(llama: Setup) -> None:
    other = llama.other_adapter()
    state = llama.reference("blend", weights=WEIGHTS)
    play_reference(state, STEPS[:3])
    engine = llama.engine("blend", blend_weight=WEIGHTS)
    prompt = [*play_engine(engine, STEPS[:3]).token_ids, 30]
    engine.replace_adapter("action", other)
    state.add_adapter("action", read_adapter(other))
    assert [session.length for session in engine.sessions()] == [21]
    for agent in ("action", "plan"):
        logits = engine.score(agent, prompt, tokens(2))
        assert difference([logits], [answer(state, agent, prompt, tokens(2))]) < TOLERANCE
        prompt = [*prompt, *tokens(2), 31]


def test_an_adapter_that_comes_later_is_caught_up_over_the_mixed_base(llama: Setup) -> None:
    early = {name: path for name, path in llama.adapters().items() if name != "reflect"}
    state = llama.reference("blend", early, weights=WEIGHTS)
    play_reference(state, STEPS[:2])
    engine = llama.engine("blend", None, early, blend_weight=WEIGHTS)
    prompt = [*play_engine(engine, STEPS[:2]).token_ids, 30]
    engine.add_adapter("reflect", llama.adapters()["reflect"])
    state.add_adapter("reflect", read_adapter(llama.adapters()["reflect"]))
    logits = engine.score("reflect", prompt, tokens(2))
    assert difference([logits], [answer(state, "reflect", prompt, tokens(2))]) < TOLERANCE


@pytest.mark.parametrize("call", [1, 2])
def test_a_neutral_pass_that_fails_mixes_nothing_twice(llama: Setup, call: int) -> None:
    state = llama.reference("blend", weights=WEIGHTS)
    with llama.engine(
        "blend", "idle-lazy-prefill", blend_weight=WEIGHTS, prefill_chunk=8
    ) as engine:
        with engine.no_idle_work():
            prompt = play_engine(engine, STEPS[:1]).token_ids
            with failing_layer(engine, call):
                for _ in range(call - 1):
                    assert engine.idle_step()
                with pytest.raises(Fault):
                    engine.idle_step()
            held = engine.sessions()[0].length if call == 2 else 0
            assert held == 8 * (call - 1)
            answer(state, "plan", prompt[:17], prompt[17:])
            state.truncate(held)
            logits = engine.score("reflect", prompt, tokens(2))
        assert difference([logits], [answer(state, "reflect", prompt, tokens(2))]) < TOLERANCE


def test_a_session_of_other_weights_is_refused(llama: Setup, tmp_path: Path) -> None:
    engine = llama.engine("blend", blend_weight=WEIGHTS)
    prompt = [*play_engine(engine).token_ids, 30]
    engine.save_session("session-1", tmp_path / "s")
    expected = engine.score("reflect", prompt, tokens(2))
    again = llama.engine("blend", blend_weight=WEIGHTS)
    again.load_session(tmp_path / "s")
    assert torch.equal(again.score("reflect", prompt, tokens(2)), expected)
    with pytest.raises(CacheFileError, match="policy is 'blend"):
        llama.engine("blend").load_session(tmp_path / "s")


def test_settings_that_do_not_fit_are_refused(llama: Setup) -> None:
    cases: list[Any] = [1.5, -0.1, True, (0.5, 2.0)]
    for weight in cases:
        with pytest.raises(ConfigError, match="blend_weight"):
            EngineConfig(blend_weight=weight)
    with pytest.raises(ConfigError, match="'3 weights', allowed is one, or 4"):
        llama.engine("blend", blend_weight=(0.5, 0.5, 0.5))
    with pytest.raises(UnknownPolicyError, match="double-batch"):
        llama.engine("blend", "double-batch")
