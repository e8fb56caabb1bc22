"""What is reused, what that looks like from outside, and that looking and matching harm nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.engine.setup import Setup
from tests.engine.trajectories import (
    METHODS,
    SHARED_METHODS,
    STEPS,
    TOLERANCE,
    WRONG,
    Step,
    difference,
    other_than,
    play_engine,
    reused,
    stored,
    stored_difference,
    tokens,
)

PROMPT = tokens(20)


@pytest.mark.parametrize(("policy", "schedule"), METHODS[:4])
def test_the_same_request_twice_reruns_its_last_token_only(
    llama: Setup, policy: str, schedule: str | None
) -> None:
    engine = llama.engine(policy, schedule)
    cold = engine.generate("plan", PROMPT, max_tokens=3, ignore_eos=True, logprobs=20)
    warm = engine.generate("plan", PROMPT, max_tokens=3, ignore_eos=True, logprobs=20)
    assert cold.token_ids == warm.token_ids
    assert (cold.usage.cached_tokens, warm.usage.cached_tokens) == (0, 19)
    for one, other in zip(cold.logprobs, warm.logprobs, strict=True):
        assert abs(one.logprob - other.logprob) < TOLERANCE
    (session,) = engine.sessions()
    assert session.length == 22


@pytest.mark.parametrize("agent", ["base", "action"])
@pytest.mark.parametrize(("policy", "schedule"), SHARED_METHODS)
def test_a_prompt_that_is_cached_to_the_last_token(
    llama: Setup, policy: str, schedule: str | None, agent: str
) -> None:
    with llama.engine(policy, schedule) as engine:
        engine.score("plan", PROMPT, tokens(1))
        out = engine.generate(agent, PROMPT, max_tokens=1)
        assert out.usage.cached_tokens == 19
        assert out.usage.shared_tokens == 19
        assert engine.sessions()[0].token_ids == tuple(PROMPT)


def test_cold_equals_warm(llama: Setup) -> None:
    """Twenty prompts on one trunk, exact policy: the cache changes nothing but the work."""
    engine, cold = llama.engine("nonshared"), llama.engine("nonshared")
    hits = 0
    for seed in range(20):
        prompt = [*PROMPT[: 10 + seed % 10], *tokens(1 + seed % 4, seed)]
        before = engine.stats().reused_tokens
        warm = engine.score("plan", prompt, tokens(2, seed))
        hits += engine.stats().reused_tokens - before
        cold.reset()
        assert difference([warm], [cold.score("plan", prompt, tokens(2, seed))]) < TOLERANCE
    assert hits > 150
    assert cold.stats().reused_tokens == 0


@pytest.mark.parametrize(("policy", "schedule"), METHODS)
def test_requests_that_only_match_leave_the_stored_prefix_alone(
    llama: Setup, policy: str, schedule: str | None
) -> None:
    with llama.engine(policy, schedule) as engine:
        engine.score("plan", PROMPT, tokens(1))
        while engine.idle_step():
            pass
        trajectory = engine.store.trajectories[0]
        before = {
            name: part[..., :19, :] if part.dim() == 3 else part[:19]
            for name, part in stored(engine, trajectory).items()
            if name.startswith(("k.", "v."))
        }
        for seed in range(3):
            assert reused(engine, "plan", [*PROMPT[:19], 20 + seed, 30], tokens(3, seed)) == 19
        after = {
            name: part[..., :19, :]
            for name, part in stored(engine, trajectory).items()
            if name in before
        }
        assert stored_difference(after, before) == 0


def test_lookups_are_counted_by_reason(llama: Setup) -> None:
    engine = llama.engine(cache_memory=250_000)
    engine.score("plan", PROMPT, tokens(1))
    engine.score("action", [*PROMPT, 11, 12], tokens(1))
    engine.score("action", [other_than(PROMPT[0]), *PROMPT], tokens(1))
    engine.score("action", [55], tokens(1))
    assert engine.stats().lookups == {"cold": 1, "hit": 1, "diverged": 1, "too_short": 1}
    engine.replace_adapter("plan", llama.other_adapter())
    engine.score("plan", [*PROMPT, 11, 12], tokens(1))
    assert engine.stats().lookups["adapter_changed"] == 1
    for seed in range(1, 5):
        engine.score("plan", [20 + seed, *tokens(60, seed)], tokens(1))
    engine.score("plan", PROMPT, tokens(1))
    assert engine.stats().lookups["evicted"] == 1
    assert engine.stats().evictions > 0


def test_seven_tokens_are_enough_for_a_hit(llama: Setup) -> None:
    engine = llama.engine()
    engine.score("plan", tokens(7), tokens(1))
    assert reused(engine, "action", [*tokens(7), 5], tokens(1)) == 7


def test_a_session_says_who_wrote_what_for_whom(llama: Setup) -> None:
    engine = llama.engine("prelrshared")
    played = play_engine(engine, STEPS[:5])
    (session,) = engine.sessions()
    assert session.token_ids == tuple(played.token_ids[:-1])
    assert [(run.start, run.end, run.writer.name) for run in session.writers] == [
        (0, 21, "plan"),
        (21, 26, "action"),
        (26, 36, "reflect"),
        (36, 38, "plan"),
        (38, 43, "base"),
    ]
    assert [strip.covered for strip in session.strips] == [((0, 43),)] * 3
    assert session.bytes == session.base_bytes + sum(strip.bytes for strip in session.strips)
    assert (session.length, session.pending_tokens, session.busy) == (43, 0, False)
    assert engine.stats().sessions == 1


def test_usage_says_what_others_wrote(llama: Setup) -> None:
    engine = llama.engine("prelrshared")
    first = engine.generate("plan", PROMPT, max_tokens=1)
    prompt = [*PROMPT, *first.token_ids, 30]
    assert engine.generate("plan", prompt, max_tokens=1).usage.shared_tokens == 0
    assert engine.generate("action", prompt, max_tokens=1).usage.shared_tokens == 21
    assert first.usage.cached_tokens == 0


def test_reset_drops_everything_but_what_runs(llama: Setup) -> None:
    engine = llama.engine()
    engine.score("plan", PROMPT, tokens(1))
    stream = engine.stream("plan", [11, *tokens(20, seed=2)], max_tokens=4, ignore_eos=True)
    next(stream)
    engine.reset()
    (session,) = engine.sessions()
    assert session.busy
    assert len(list(stream)) == 3
    assert reused(engine, "plan", PROMPT, tokens(1)) == 0


@pytest.mark.parametrize(("policy", "schedule"), METHODS)
def test_the_base_model_is_a_legal_reader_and_writer(
    llama: Setup, policy: str, schedule: str | None
) -> None:
    steps = (Step("base", 9, 3), Step("plan", 4, 3), Step("base", 5, 3), Step("base", 1, 1))
    with llama.engine(policy, schedule) as engine:
        played = play_engine(engine, steps)
    assert difference(played.logits, llama.expected(policy, steps=steps)) < TOLERANCE
    assert difference(played.logits, llama.expected(WRONG[policy], steps=steps)) > 1e-3
    assert played.cached[-1] > 0


DIGESTS = """
import sys
from precache import Engine
engine = Engine.load(sys.argv[1], {"plan": sys.argv[2], "action": sys.argv[3]}, dtype="float32")
engine.score("plan", list(range(10, 30)), [5])
(session,) = engine.sessions()
print(engine.model.digest(), *(a.digest for a in engine.bank), *(s.key for s in session.strips))
"""


@pytest.mark.slow
def test_keys_are_the_same_in_every_process(llama: Setup) -> None:
    engine = llama.engine()
    here = [engine.model.digest(), *(engine.bank.get(name).digest for name in ("plan", "action"))]
    folders = [str(llama.adapters()[name]) for name in ("plan", "action")]
    found = set()
    for seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", DIGESTS, llama.model, *folders],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        found.add(run.stdout)
    (line,) = found
    assert line.split()[:3] == here
