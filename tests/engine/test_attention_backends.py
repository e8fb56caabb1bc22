"""The engine over another attention backend: Triton, in its interpreter, gives the logits that blocked torch gives."""

from __future__ import annotations

import pytest
import torch

from precache import Engine
from precache.engine.model import resolve_backend
from precache.errors import ConfigError
from tests.engine.setup import Setup

pytest.importorskip("triton", reason="triton is not installed")

PROMPT = [5, 9, 17, 3, 30, 8, 21, 40, 11]


def logits(setup: Setup, backend: str, policy: str, label: str) -> list[torch.Tensor]:
    """Of three turns: one that writes, one that reads what another agent wrote, one without an adapter."""
    found = []
    adapters = setup.adapters(label)
    settings = {"dtype": "float32", "attention_backend": backend}
    with Engine.load(setup.model, adapters, policy=policy, **settings) as engine:
        prompt = list(PROMPT)
        for agent in ("plan", "action", "base"):
            found.append(engine.score(agent, prompt, [7, 2]))
            output = engine.generate(agent, prompt, max_tokens=2, ignore_eos=True)
            assert output.usage.cached_tokens > 0
            prompt += [*output.token_ids, 6]
    return found


@pytest.mark.parametrize(("policy", "label"), [("prelrshared", "qkvo"), ("rebaseshared", "qv")])
def test_triton_gives_the_logits_of_the_cpu_backend(llama: Setup, policy: str, label: str) -> None:
    expected, got = (logits(llama, backend, policy, label) for backend in ("cpu", "triton"))
    for ours, theirs in zip(got, expected, strict=True):
        assert (ours - theirs).abs().max() < 1e-4
    assert (expected[0] - expected[1]).abs().max() > 0.01


def test_a_backend_that_cannot_run_is_refused_before_the_model_is_loaded() -> None:
    with pytest.raises(
        ConfigError, match="attention_backend: got 'triton', .*not in torch.float64"
    ):
        resolve_backend("triton", torch.device("cpu"), torch.float64)
