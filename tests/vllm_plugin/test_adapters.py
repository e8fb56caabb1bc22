"""Adapters that come late, change or do not fit: never a stale strip, never a request that hangs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.reference.lora import QKVO, make_adapter
from tests.vllm_plugin.engines import (
    NOTICEABLE,
    TOLERANCE,
    VLLM,
    PagedEngine,
    Said,
    paged_engine,
    reference_turn,
    tokens,
)

pytestmark = VLLM

PROMPT = tokens(100, seed=7)
LONGER = PROMPT + tokens(30, seed=8)


@pytest.fixture(scope="module", params=["prelrshared", "rebaseshared", "fullshared", "nonshared"])
def engine(request: pytest.FixtureRequest, model: str, adapters: Any) -> Iterator[PagedEngine]:
    with paged_engine(model, adapters["qv"], request.param, preload=False, max_loras=2) as engine:
        yield engine


@pytest.fixture
def fresh(engine: PagedEngine) -> PagedEngine:
    """The engine with no adapter in a slot and nothing to match."""
    core = engine.llm.llm_engine.engine_core.engine_core
    for number in (1, 2, 3):
        core.remove_lora(number)
    assert engine.llm.reset_prefix_cache()
    return engine


def error_of(
    said: Said, agent: str, prompt: list[int], folders: Any, reference: Callable[..., Any]
) -> float:
    """Against the unshared reference: what is expected of a turn that found nothing in the cache."""
    rows = reference_turn(reference("nonshared", folders), agent, prompt, said.token_ids)
    return float((said.logprobs - rows).abs().max())


def test_an_adapter_that_comes_late_does_not_read_what_has_no_strip_of_it(
    fresh: PagedEngine, adapters: Any, reference: Callable[..., Any]
) -> None:
    fresh.say([("plan", PROMPT, 4)])
    (late,) = fresh.say([("action", LONGER, 4)])
    assert late.cached == 0
    assert error_of(late, "action", LONGER, adapters["qv"], reference) < TOLERANCE
    # from here on both are resident, and what one runs the other finds
    (again,) = fresh.say([("plan", LONGER, 4)])
    assert again.cached == (96 if fresh.policy == "nonshared" else 128)


def test_new_weights_under_an_old_name_are_the_ones_that_answer(
    fresh: PagedEngine, adapters: Any, model: str, tmp_path: Path, reference: Callable[..., Any]
) -> None:
    from vllm.lora.request import LoRARequest

    (old,) = fresh.say([("plan", PROMPT, 4)])
    other = make_adapter(model, tmp_path / "other", seed=77)
    request = LoRARequest("plan", 1, str(other), load_inplace=True)
    assert fresh.llm.llm_engine.add_lora(request)
    fresh.requests["plan"] = request
    try:
        state = reference(fresh.policy, {"plan": other})
        for cached in (0, 96):  # the second time it finds its own
            (new,) = fresh.say([("plan", PROMPT, 4)])
            rows = reference_turn(state, "plan", PROMPT, new.token_ids)
            assert float((new.logprobs - rows).abs().max()) < TOLERANCE
            assert new.cached == cached
        assert error_of(old, "plan", PROMPT, {"plan": other}, reference) > NOTICEABLE
    finally:
        fresh.requests["plan"] = LoRARequest("plan", 1, str(adapters["qv"]["plan"]))
    # a path that differs from the resident one is taken up without being told
    (back,) = fresh.say([("plan", PROMPT, 4)])
    assert back.cached == 0
    assert error_of(back, "plan", PROMPT, adapters["qv"], reference) < TOLERANCE


def test_more_agents_than_slots_take_turns(
    fresh: PagedEngine, adapters: Any, reference: Callable[..., Any]
) -> None:
    prompts = {agent: tokens(40, seed=seed) for seed, agent in enumerate(adapters["qv"])}
    said = fresh.say([(agent, prompt, 5) for agent, prompt in prompts.items()])
    for (agent, prompt), turn in zip(prompts.items(), said, strict=True):
        assert error_of(turn, agent, prompt, adapters["qv"], reference) < TOLERANCE, agent
    assert fresh.free_blocks() == fresh.all_blocks()


def test_an_adapter_that_cannot_be_loaded_fails_its_own_request_only(
    fresh: PagedEngine, tmp_path: Path, adapters: Any, reference: Callable[..., Any]
) -> None:
    from vllm.lora.request import LoRARequest

    fresh.requests["ghost"] = LoRARequest("ghost", 9, str(tmp_path / "nowhere"))
    ghost, plan = fresh.llm.generate(
        [{"prompt_token_ids": PROMPT}] * 2,
        lora_request=[fresh.requests["ghost"], fresh.requests["plan"]],
        use_tqdm=False,
    )
    fresh.drain()
    assert ghost.outputs[0].finish_reason == "error"
    assert plan.outputs[0].finish_reason in ("length", "stop")
    with pytest.raises(Exception, match="nowhere"):
        fresh.llm.llm_engine.add_lora(fresh.requests["ghost"])
    (said,) = fresh.say([("plan", LONGER, 3)])
    assert said.cached == 96
    state = reference(fresh.policy, {"plan": adapters["qv"]["plan"]})
    reference_turn(state, "plan", PROMPT, plan.outputs[0].token_ids)
    rows = reference_turn(state, "plan", LONGER, said.token_ids)
    assert float((said.logprobs - rows).abs().max()) < TOLERANCE


def test_key_lora_is_refused_where_keys_are_shared_as_they_are(
    fresh: PagedEngine, model: str, tmp_path: Path
) -> None:
    from vllm.lora.request import LoRARequest

    from precache.errors import PolicyNotAllowedError

    keyed = LoRARequest("keyed", 8, str(make_adapter(model, tmp_path / "keyed", targets=QKVO)))
    if fresh.policy in ("nonshared", "fullshared"):
        assert fresh.llm.llm_engine.add_lora(keyed)
        fresh.llm.llm_engine.remove_lora(8)
        return
    with pytest.raises(PolicyNotAllowedError, match="k_proj"):
        fresh.llm.llm_engine.add_lora(keyed)
    assert 8 not in fresh.llm.llm_engine.list_loras()
