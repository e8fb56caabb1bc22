"""Every policy on vLLM is the method of that name: log-probabilities against the slow reference, in fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.reference.policies import POLICIES, PreLRShared, ReBaseShared
from tests.vllm_plugin.engines import (
    NOTICEABLE,
    TOLERANCE,
    VLLM,
    PagedEngine,
    Step,
    difference,
    expected_logprobs,
    paged_engine,
    play,
    reference_turn,
    tokens,
)

pytestmark = VLLM

STEPS = (
    Step("plan", 100, 10),
    Step("action", 5, 40),
    Step("reflect", 40, 3),
    Step("plan", 3, 35),
    Step("base", 20, 5),
    Step("action", 33, 6),
)
SHARED = [0, 96, 128, 192, 224, 256]  # tokens reused by each step's prompt
# A method that is wrong in the place of another.
WRONG = {
    "nonshared": "fullshared",
    "fullshared": "nonshared",
    "prelrshared": "baseshared",
    "rebaseshared": "prelrshared",
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked": {"max_num_batched_tokens": 48, "max_num_seqs": 8},
    "wide": {
        "max_lora_rank": 16
    },  # 3 slots of 16 columns are wider than a head: no two-pass decode
}
CASES = [
    *[(policy, label, "plain") for policy in WRONG for label in ("qv", "all_but_k")],
    ("prelrshared", "qv", "chunked"),
    ("prelrshared", "qv", "wide"),
    ("rebaseshared", "qv", "chunked"),
]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest, model: str, adapters: Any) -> Iterator[Any]:
    policy, label, settings = request.param
    with paged_engine(model, adapters[label], policy, **SETTINGS[settings]) as engine:
        yield engine, policy, adapters[label]


def test_a_trajectory_is_the_policys_own(case: Any, reference: Callable[..., Any]) -> None:
    engine, policy, folders = case
    before = engine.scheduler.counters.shadow_tokens
    played = play(engine, STEPS, seed=1)
    assert difference(played, expected_logprobs(reference(policy, folders), played)) < TOLERANCE
    wrong = reference(WRONG[policy], folders)
    assert difference(played, expected_logprobs(wrong, played)) > NOTICEABLE
    assert played.cached == (SHARED if policy != "nonshared" else [0, 0, 0, 96, 0, 128])
    assert (engine.scheduler.counters.shadow_tokens > before) == (policy == "rebaseshared")
    assert engine.free_blocks() == engine.all_blocks()


def test_requests_of_all_agents_run_in_one_batch(case: Any, reference: Callable[..., Any]) -> None:
    engine, policy, folders = case
    prefix = tokens(70, seed=2)
    (first,) = engine.say([("plan", prefix, 30)])
    told = prefix + first.token_ids  # 99 tokens of it were run: three blocks
    prompts = {
        agent: told + tokens(count, seed=3)
        for agent, count in (("reflect", 9), ("base", 1), ("plan", 40), ("action", 2))
    }
    batch = engine.say([(agent, prompt, 8) for agent, prompt in prompts.items()])
    for (agent, prompt), said in zip(prompts.items(), batch, strict=True):
        state = reference(policy, folders)
        reference_turn(state, "plan", prefix, first.token_ids)
        expected = reference_turn(state, agent, prompt, said.token_ids)
        assert float((said.logprobs - expected).abs().max()) < TOLERANCE, agent
        assert said.cached == (96 if policy != "nonshared" or agent == "plan" else 0)


class WithoutMove(ReBaseShared):
    """Wrong on purpose: the writer's own strip comes from the neutral pass too."""

    def write(self, agent: str | None, new_tokens: list[int], start: int, adapted: Any) -> None:
        neutral = self.adapted_pass(None, new_tokens, start)
        self.append_base(neutral.inputs, start)
        self.append_strips(start, lambda _name: neutral.inputs)


class OnlyOwnStrip(PreLRShared):
    """Wrong on purpose: readers see their strip where they wrote, and the base alone elsewhere."""

    def write(self, agent: str | None, new_tokens: list[int], start: int, adapted: Any) -> None:
        self.append_base(adapted.inputs, start)
        nothing = [0 * x for x in adapted.inputs]
        self.append_strips(start, lambda name: adapted.inputs if name == agent else nothing)


@pytest.mark.parametrize(
    ("policy", "wrong"), [("rebaseshared", WithoutMove), ("prelrshared", OnlyOwnStrip)]
)
def test_the_comparison_sees_a_missing_strip(
    policy: str,
    wrong: Any,
    model: str,
    adapters: Any,
    reference: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(POLICIES, "wrong", wrong)
    with paged_engine(model, adapters["qv"], policy) as engine:
        played = play(engine, STEPS)
    right = expected_logprobs(reference(policy, adapters["qv"]), played)
    assert difference(played, right) < TOLERANCE
    wrong_rows = expected_logprobs(reference("wrong", adapters["qv"]), played)
    assert difference(played, wrong_rows) > NOTICEABLE


def test_one_agent_alone_has_its_exact_cache(
    model: str, adapters: Any, reference: Callable[..., Any]
) -> None:
    plan = {"plan": adapters["qv"]["plan"]}
    with paged_engine(model, plan, "prelrshared") as engine:
        played = play(engine, [Step("plan", 50, 20), Step("plan", 7, 9)])
    assert played.cached == [0, 64]
    assert difference(played, expected_logprobs(reference("nonshared", plan), played)) < TOLERANCE


def test_stock_vllm_gives_base_rows_an_adapters_delta(
    model: str, adapters: Any, reference: Callable[..., Any]
) -> None:
    """The bug that GroupedPunicaWrapper is there for; when vLLM has mended it, the wrapper's reason is speed."""
    folders = adapters["all_but_k"]

    def base_row_error(engine: PagedEngine) -> float:
        prompts = tokens(20, seed=4), tokens(21, seed=5)
        base, plan = engine.say([("base", prompts[0], 4), ("plan", prompts[1], 4)])
        rows = [
            reference_turn(reference("nonshared", folders), agent, prompt, said.token_ids)
            for agent, prompt, said in (("base", prompts[0], base), ("plan", prompts[1], plan))
        ]
        assert float((plan.logprobs - rows[1]).abs().max()) < TOLERANCE
        return float((base.logprobs - rows[0]).abs().max())

    with paged_engine(model, folders, None) as engine:
        assert base_row_error(engine) > NOTICEABLE
    with paged_engine(model, folders, "nonshared") as engine:
        assert base_row_error(engine) < TOLERANCE
