"""Invariant 2: where methods must agree with transformers and PEFT, with the base model, or with each other."""

from __future__ import annotations

import peft
import pytest
import torch
from torch import Tensor
from transformers import AttentionMaskInterface, AutoModelForCausalLM

from tests.engine.conftest import SetupOf
from tests.engine.setup import Setup
from tests.engine.trajectories import (
    METHODS,
    NOTICEABLE,
    REUSED,
    REUSED_ALONE,
    STEPS,
    TOLERANCE,
    Step,
    difference,
    play_engine,
    tokens,
)

LOGITS_OF = [(17, 5), (24, 3), (33, 4), (38, 1), (42, 2), (48, 6), (55, 2)]  # prompt, output


def peft_logits(setup: Setup, label: str, token_ids: list[int]) -> list[Tensor]:
    """The logits of every output of STEPS by plain transformers and PEFT, nothing cached."""
    base = AutoModelForCausalLM.from_pretrained(
        setup.model, dtype=torch.float32, attn_implementation="eager"
    )
    first, *others = setup.adapters(label).items()
    model = peft.PeftModel.from_pretrained(base, first[1], adapter_name=first[0])
    for name, path in others:
        model.load_adapter(path, adapter_name=name)
    found = []
    with torch.inference_mode():
        for step, (start, count) in zip(STEPS, LOGITS_OF, strict=True):
            ids = torch.tensor([token_ids[: start + count - 1]])
            if step.agent == "base":
                with model.disable_adapter():
                    logits = model(ids).logits
            else:
                model.set_adapter(step.agent)
                logits = model(ids).logits
            found.append(logits[0, start - 1 :])
    return found


@pytest.mark.parametrize(
    ("kind", "label"),
    [
        ("llama", "qv"),
        ("llama", "patterns"),
        ("llama", "mixed"),
        ("qwen2", "qkvo"),
        ("gemma3", "qv"),
    ],
)
def test_nonshared_equals_transformers_and_peft(setup_of: SetupOf, kind: str, label: str) -> None:
    setup = setup_of(kind)
    played = play_engine(setup.engine("nonshared", adapters=setup.adapters(label)))
    expected = peft_logits(setup, label, played.token_ids)
    assert difference(played.logits, expected) < TOLERANCE
    assert difference(played.logits[1:2], setup.expected("fullshared", label)[1:2]) > NOTICEABLE
    assert played.cached == REUSED_ALONE


@pytest.mark.parametrize("label", ["qv", "qkvo"])
def test_with_one_agent_prelrshared_equals_nonshared(llama: Setup, label: str) -> None:
    steps = tuple(Step("plan", step.prompt, step.output) for step in STEPS)
    one = {"plan": llama.adapters(label)["plan"]}
    played = play_engine(llama.engine("prelrshared", adapters=one), steps)
    alone = play_engine(llama.engine("nonshared", adapters=one), steps)
    assert difference(played.logits, alone.logits) < TOLERANCE
    assert played.cached == alone.cached == REUSED


@pytest.mark.parametrize("label", ["zero", "none"])
@pytest.mark.parametrize(("policy", "schedule"), METHODS)
def test_with_zero_adapters_everything_is_the_base_model(
    llama: Setup, policy: str, schedule: str | None, label: str
) -> None:
    adapters = llama.adapters("zero") if label == "zero" else {}
    steps = STEPS if adapters else tuple(Step("base", s.prompt, s.output) for s in STEPS)
    with llama.engine(policy, schedule, adapters) as engine:
        played = play_engine(engine, steps)
    with torch.inference_mode():
        logits = llama.stock(torch.tensor([played.token_ids])).logits[0]
    expected = [logits[start - 1 : start + count - 1] for start, count in LOGITS_OF]
    assert difference(played.logits, expected) < TOLERANCE
    assert difference(played.logits, llama.expected(policy)) > NOTICEABLE
    assert played.cached[-1] > 0


@pytest.mark.parametrize("new", [10, 1])
def test_tokens_on_a_cached_prefix_equal_stock_sdpa(llama: Setup, new: int) -> None:
    """A custom attention without its mask function passes a full prefill and fails here."""
    ids = tokens(10 + new, seed=3)
    engine = llama.engine()
    engine.score("base", ids[:10], ids[10:11])
    logits = engine.score("base", ids, tokens(1))
    stock = AutoModelForCausalLM.from_pretrained(
        llama.model, dtype=torch.float32, attn_implementation="sdpa"
    )
    with torch.inference_mode():
        expected = stock(torch.tensor([ids])).logits[0, -1:]
    assert difference([logits], [expected]) < TOLERANCE
    assert engine.stats().reused_tokens == min(10, len(ids) - 1)
    assert "precache" in AttentionMaskInterface().valid_keys()
