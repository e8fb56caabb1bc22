"""Too little memory, requests that are given up, prefixes that several agents bring: nothing hangs, nothing leaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.vllm_plugin.engines import (
    BLOCK,
    TOLERANCE,
    VLLM,
    PagedEngine,
    paged_engine,
    reference_turn,
    tokens,
)

pytestmark = VLLM

NUM_BLOCKS = 14


@pytest.fixture(scope="module", params=["prelrshared", "rebaseshared"])
def engine(request: pytest.FixtureRequest, model: str, adapters: Any) -> Iterator[PagedEngine]:
    settings = {"num_gpu_blocks_override": NUM_BLOCKS, "max_model_len": 192}
    with paged_engine(model, adapters["qv"], request.param, **settings) as engine:
        engine.count_preemptions()
        yield engine


def test_more_requests_than_memory_all_end(
    engine: PagedEngine, adapters: Any, reference: Callable[..., Any]
) -> None:
    turns = [
        (agent, tokens(60, seed=10 * round_ + number), 70)
        for round_ in range(2)
        for number, agent in enumerate(adapters["qv"])
    ]
    said = engine.say(turns)
    assert [len(turn.token_ids) for turn in said] == [70] * len(turns)
    assert engine.free_blocks() == engine.all_blocks()
    assert engine.num_preemptions > 0
    if engine.policy == "prelrshared":  # the writer's own tokens are exact, run once or twice
        for (agent, prompt, _), turn in zip(turns, said, strict=True):
            state = reference("nonshared", adapters["qv"])
            rows = reference_turn(state, agent, prompt, turn.token_ids)
            assert float((turn.logprobs - rows).abs().max()) < TOLERANCE


def test_after_the_pressure_a_trajectory_is_exact_again(
    engine: PagedEngine, adapters: Any, reference: Callable[..., Any]
) -> None:
    prefix = tokens(70, seed=99)
    (first,) = engine.say([("plan", prefix, 30)])
    told = [*prefix, *first.token_ids, *tokens(5, seed=98)]
    (second,) = engine.say([("action", told, 6)])
    assert second.cached == 96
    state = reference(engine.policy, adapters["qv"])
    reference_turn(state, "plan", prefix, first.token_ids)
    rows = reference_turn(state, "action", told, second.token_ids)
    assert float((second.logprobs - rows).abs().max()) < TOLERANCE


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 40])
def test_an_aborted_request_gives_its_blocks_back(
    engine: PagedEngine, adapters: Any, reference: Callable[..., Any], steps: int
) -> None:
    from vllm import SamplingParams

    llm = engine.llm.llm_engine
    prompt = tokens(70, seed=50 + steps)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    internal = llm.add_request(
        "gone", {"prompt_token_ids": prompt}, params, lora_request=engine.requests["plan"]
    )
    for _ in range(steps):
        llm.step()
    llm.abort_request([internal or "gone"], internal=True)
    engine.drain()
    assert engine.scheduler.requests == {}
    assert engine.free_blocks() == engine.all_blocks()
    # what it may have left behind is a valid prefix
    told = prompt + tokens(4, seed=1)
    (said,) = engine.say([("action", told, 4)])
    state = reference(engine.policy, adapters["qv"])
    if said.cached:
        state.turn("plan", prompt[: said.cached])
    rows = reference_turn(state, "action", told, said.token_ids)
    assert float((said.logprobs - rows).abs().max()) < TOLERANCE


def test_two_agents_with_the_same_new_prefix_publish_it_once(
    engine: PagedEngine, adapters: Any
) -> None:
    prompt = tokens(100, seed=70)
    before = engine.scheduler.counters.shadow_tokens
    engine.say([("plan", prompt, 2), ("action", prompt, 2)])
    (third,) = engine.say([("reflect", prompt, 2)])
    assert third.cached == 96
    if engine.policy == "rebaseshared":
        run = engine.scheduler.counters.shadow_tokens - before
        assert 96 <= run <= 96 + BLOCK
    assert engine.free_blocks() == engine.all_blocks()
