"""Half precision: the drift from fp32 is bounded, as that of stock transformers is; no more is promised."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.conftest import SetupOf
from tests.engine.setup import Setup
from tests.engine.trajectories import IN_ORDER, REUSED, Step, difference, play_engine, tokens

# A choice of rows by scores that rounding changes is another choice, not drift.
METHODS = [method for method in IN_ORDER if method[0] not in ("cacheblend", "relaycaching")]
MAX_DRIFT = 2.0  # of logits that span 20: weights this large are far noisier than a trained model's


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize(("policy", "schedule"), METHODS)
def test_bfloat16_drifts_within_bounds(
    setup_of: SetupOf, kind: str, policy: str, schedule: str | None
) -> None:
    setup = setup_of(kind)
    played = play_engine(setup.engine(policy, schedule, dtype="bfloat16"))
    assert all(logits.dtype == torch.float32 for logits in played.logits)
    assert difference(played.logits, setup.expected(policy)) < MAX_DRIFT
    assert played.cached[-1] > 0
    if policy != "nonshared":
        assert played.cached == REUSED


def test_bfloat16_is_no_further_from_fp32_than_stock_transformers(llama: Setup) -> None:
    ids = tokens(60)
    engine = llama.engine(dtype="bfloat16")
    engine.score("base", ids[:30], ids[30:31])
    ours = engine.score("base", ids[:31], ids[31:])
    stock = AutoModelForCausalLM.from_pretrained(
        llama.model, dtype=torch.bfloat16, attn_implementation="eager"
    )
    with torch.inference_mode():
        exact = llama.stock(torch.tensor([ids])).logits[0, 30:-1]
        theirs = stock(torch.tensor([ids])).logits[0, 30:-1].float()
    assert difference([ours], [exact]) <= 2 * difference([theirs], [exact])
    assert engine.stats().reused_tokens == 30


def test_the_cache_is_held_in_the_dtype_of_the_model(llama: Setup) -> None:
    half, full = llama.engine(dtype="bfloat16"), llama.engine()
    for engine in (half, full):
        play_engine(engine, (Step("plan", 20, 3),))
    assert 2 * half.stats().bytes_held == full.stats().bytes_held


def test_float16_runs(llama: Setup) -> None:
    out = llama.engine(dtype="float16").generate("plan", tokens(20), max_tokens=4, ignore_eos=True)
    assert len(out.token_ids) == 4
