"""Tensor parallelism: each rank holds its heads' values and all of X A."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.vllm_plugin.engines import (
    TOLERANCE,
    VLLM,
    Step,
    difference,
    expected_logprobs,
    paged_engine,
    play,
)

pytestmark = VLLM

STEPS = (Step("plan", 70, 30), Step("action", 9, 5), Step("base", 40, 3), Step("reflect", 2, 4))


@pytest.mark.parametrize(("policy", "label"), [("rebaseshared", "all_but_k")])
def test_two_ranks_are_exact(
    policy: str, label: str, model: str, adapters: Any, reference: Callable[..., Any]
) -> None:
    folders = adapters[label]
    with paged_engine(model, folders, policy, tensor_parallel_size=2) as two:
        played = play(two, STEPS)
    with paged_engine(model, folders, policy) as one:
        alone = play(one, STEPS)
    assert played.cached == alone.cached == [0, 96, 96, 128]
    assert difference(played, [said.logprobs for _, _, said in alone.turns]) < TOLERANCE
    assert difference(played, expected_logprobs(reference(policy, folders), played)) < TOLERANCE
