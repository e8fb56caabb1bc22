"""Which token is picked: penalties and filters against transformers' own, seeds, and the mask of a grammar."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from precache.engine.sampler import Sampler
from precache.request import SamplingParams

VOCAB = 50


def some_logits(seed: int = 0) -> Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.5


def drawn(logits: Tensor, count: int = 400, prompt: Sequence[int] = (), **fields: Any) -> list[int]:
    sampler = Sampler(SamplingParams(seed=1, **fields), prompt)
    return [sampler.sample(logits) for _ in range(count)]


def expected_probs(logits: Tensor, *warpers: Any) -> Tensor:
    scores = logits[None]
    for warper in warpers:
        scores = warper(torch.empty(1, 0, dtype=torch.long), scores)
    return scores.softmax(-1)[0]


def test_greedy_takes_the_likeliest() -> None:
    logits = some_logits()
    assert drawn(logits, 3) == [int(logits.argmax())] * 3


@pytest.mark.parametrize(
    ("fields", "warpers"),
    [
        ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
        ({"temperature": 1.0, "top_k": 5}, [TopKLogitsWarper(5)]),
        (
            {"temperature": 1.5, "top_p": 0.95},
            [TemperatureLogitsWarper(1.5), TopPLogitsWarper(0.95)],
        ),
        ({"temperature": 1.5, "min_p": 0.1}, [TemperatureLogitsWarper(1.5), MinPLogitsWarper(0.1)]),
        (
            {"temperature": 2.0, "min_p": 0.05, "top_k": 8, "top_p": 0.9},
            [
                TemperatureLogitsWarper(2.0),
                MinPLogitsWarper(0.05),
                TopKLogitsWarper(8),
                TopPLogitsWarper(0.9),
            ],
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_draws_follow_transformers_distribution(fields: Any, warpers: list[Any]) -> None:
    logits = some_logits()
    probs = expected_probs(logits, *warpers)
    assert (probs > 0.01).sum() > 3, "nothing to tell apart"
    count = 1500
    found = torch.bincount(torch.tensor(drawn(logits, count, **fields)), minlength=VOCAB) / count
    assert found[probs == 0].sum() == 0
    assert torch.all((found - probs).abs() <= 5 * (probs * (1 - probs) / count).sqrt() + 1e-3)


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}])
def test_the_tightest_filter_leaves_the_likeliest(fields: Any) -> None:
    logits = some_logits()
    assert set(drawn(logits, 20, temperature=5.0, **fields)) == {int(logits.argmax())}


@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 1e-5, 1e-4, 100.0])
def test_extreme_temperatures_and_logits_work(temperature: float) -> None:
    logits = torch.tensor([-3e38, 3e38, 0.0, -3e38])
    assert drawn(logits, 5, temperature=temperature, top_p=0.9) == [1] * 5


def test_the_same_seed_gives_the_same_tokens_another_seed_others() -> None:
    logits = some_logits()

    def run(seed: int | None) -> list[int]:
        sampler = Sampler(SamplingParams(temperature=2.0, seed=seed), [])
        return [sampler.sample(logits) for _ in range(30)]

    assert run(7) == run(7)
    assert run(7) != run(8)
    assert run(-(2**63)) == run(-(2**63))
    assert run(None) != run(None)


def test_other_random_numbers_do_not_disturb_a_seeded_turn() -> None:
    logits = some_logits()
    torch.manual_seed(0)
    first = drawn(logits, 20, temperature=2.0)
    torch.manual_seed(1)
    torch.rand(3)
    assert drawn(logits, 20, temperature=2.0) == first


def test_repetition_penalty_is_transformers_own_over_prompt_and_output() -> None:
    prompt = [3, 4, 3]
    sampler = Sampler(SamplingParams(repetition_penalty=1.7), prompt)
    history = list(prompt)
    changed = 0
    for step in range(40):
        logits = some_logits(step)
        scores = RepetitionPenaltyLogitsProcessor(1.7)(
            torch.tensor([history]), logits[None].clone()
        )
        token_id = sampler.sample(logits)
        assert token_id == int(scores.argmax())
        history.append(token_id)
        changed += token_id != int(logits.argmax())
    assert changed > 3


def test_presence_and_frequency_count_the_output_only() -> None:
    logits = torch.tensor([2.0, 1.9, 0.0])
    assert drawn(logits, 3, [0, 0, 0], presence_penalty=1.0) == [0, 1, 0]
    # Token 0 loses 0.06 each time it was sampled: 2.0, 1.94, then 1.88 is below 1.9.
    assert drawn(logits, 4, [0, 0, 0], frequency_penalty=0.06) == [0, 0, 1, 0]


def test_a_mask_sees_the_output_and_forbids_tokens() -> None:
    seen = []

    def mask(output: Sequence[int], logits: Tensor) -> Tensor:
        seen.append(list(output))
        return logits.index_fill(0, torch.tensor([0]), -math.inf)

    sampler = Sampler(SamplingParams(repetition_penalty=2.0), [0], logits_mask=mask)
    logits = torch.tensor([9.0, 5.0, 4.0])
    assert [sampler.sample(logits), sampler.sample(logits)] == [1, 2]
    assert seen == [[], [1]]


@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 1.0, "top_k": 3, "top_p": 0.5, "presence_penalty": 1.0}]
)
def test_the_given_logits_stay_as_they_are(fields: Any) -> None:
    logits = some_logits()
    before = logits.clone()
    drawn(logits, 3, repetition_penalty=1.3, min_p=0.1, **fields)
    assert torch.equal(logits, before)


def test_logprobs_are_the_models_own() -> None:
    logits = some_logits()
    sampler = Sampler(SamplingParams(temperature=3.0, top_k=1), [])
    found = sampler.logprobs(logits, 7, 3)
    expected = logits.log_softmax(-1)
    assert found.token_id == 7
    assert found.logprob == pytest.approx(float(expected[7]))
    assert [i for i, _ in found.top] == logits.topk(3).indices.tolist()
    assert [p for _, p in found.top] == pytest.approx(expected.topk(3).values.tolist())
    assert sampler.logprobs(logits, 7, 0).top == ()


def test_more_alternatives_than_tokens_gives_all() -> None:
    assert len(Sampler(SamplingParams(), []).logprobs(torch.zeros(3), 0, 20).top) == 3
    assert drawn(torch.zeros(3), 5, temperature=1.0, top_k=1_000_000)
