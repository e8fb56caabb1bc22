"""The shape of the controlled trace."""

from __future__ import annotations

import pytest

from precache.bench.adapters import agent_names
from precache.bench.trace import Step, controlled_trace

THREE = ("plan", "action", "reflect")


def test_the_trace_of_the_paper():
    steps = controlled_trace(256, THREE).steps
    opening = [Step("plan", 512, 32), Step("plan", 8, 8), Step("action", 8, 8)]
    later = [Step("plan", 256, 32), Step("plan", 8, 8), Step("action", 8, 8)]
    ending = [Step("reflect", 32, 32), Step("reflect", 8, 8)]
    assert list(steps) == opening + 4 * later + ending


@pytest.mark.parametrize(("chunk", "tokens"), [(256, 1_936), (2048, 9_104), (16384, 66_448)])
def test_lengths_of_the_finished_trajectory(chunk: int, tokens: int):
    trace = controlled_trace(chunk, THREE)
    assert trace.tokens == trace.prompt_tokens + trace.output_tokens == tokens


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_every_agent_takes_part(count: int):
    names = agent_names(count)
    assert len(set(names)) == len(names) == count
    assert {step.agent for step in controlled_trace(64, names).steps} == set(names)


def test_more_agents_add_one_short_turn_a_round_each():
    four, eight = (controlled_trace(64, agent_names(count)) for count in (4, 8))
    assert len(eight.steps) - len(four.steps) == 4 * 5
    assert eight.prompt_tokens - four.prompt_tokens == 4 * 5 * 8


def test_fresh_prompts_depend_on_the_seed_only():
    trace = controlled_trace(64, THREE)
    prompts = trace.fresh_prompts(100, seed=1)
    assert [len(prompt) for prompt in prompts] == [step.prompt for step in trace.steps]
    assert prompts == trace.fresh_prompts(100, seed=1) != trace.fresh_prompts(100, seed=2)
    assert all(0 <= token_id < 100 for prompt in prompts for token_id in prompt)
