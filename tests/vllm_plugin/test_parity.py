"""The transformers engine and vLLM under the same policy say the same about the same trajectory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from precache import Engine
from tests.vllm_plugin.engines import TOLERANCE, VLLM, Step, paged_engine, play

pytestmark = VLLM

# Every turn ends on a block boundary, so both reuse the same tokens.
STEPS = (
    Step("plan", 100, 29),
    Step("action", 20, 12),
    Step("reflect", 5, 27),
    Step("base", 10, 22),
    Step("plan", 3, 29),
)
SHARED = [0, 128, 160, 192, 224]


@pytest.mark.parametrize("policy", ["nonshared", "fullshared", "prelrshared", "rebaseshared"])
def test_both_engines_agree(policy: str, model: str, adapters: Any) -> None:
    folders = adapters["qv"]
    with paged_engine(model, folders, policy) as paged:
        played = play(paged, STEPS)
    if policy != "nonshared":
        assert played.cached == SHARED
    with Engine.load(model, adapters=folders, policy=policy, dtype="float32") as engine:
        for agent, prompt, said in played.turns:
            before = engine.stats().reused_tokens
            logits = engine.score(agent, prompt, said.token_ids)
            if policy != "nonshared":
                assert engine.stats().reused_tokens - before == said.cached
            difference = said.logprobs - torch.log_softmax(logits, dim=-1)
            assert float(difference.abs().max()) < TOLERANCE, agent
