"""Invariant 1: logits and caches are those of a slow reference that follows the table of methods by the letter.

An equality alone proves nothing: beside each stands that the cache was hit, and that another method would be noticed.
"""

from __future__ import annotations

import pytest

from tests.engine.conftest import SetupOf
from tests.engine.setup import LABELS, Setup
from tests.engine.trajectories import (
    IN_ORDER,
    METHODS,
    NOTICEABLE,
    REUSED,
    REUSED_ALONE,
    SELECTIVE_METHODS,
    SHARED_METHODS,
    STEPS,
    STRIP_METHODS,
    TOLERANCE,
    WRONG,
    answer,
    difference,
    logprob_difference,
    only_trajectory,
    other_than,
    play_engine,
    play_reference,
    script,
    stored,
    stored_by_reference,
    stored_difference,
    tokens,
)
from tests.reference.models import MODEL_KINDS

OTHER_KINDS = tuple(kind for kind in MODEL_KINDS if kind != "llama")
KEY_LORA_METHODS = [method for method in IN_ORDER if method in (*STRIP_METHODS, *SELECTIVE_METHODS)]
KEY_LORA_KINDS = ("mistral_swa", "ministral", "qwen2", "gemma2")


def follows_the_definition(setup: Setup, policy: str, schedule: str | None, label: str) -> None:
    adapters = setup.adapters(label)
    with setup.engine(policy, schedule, adapters) as engine:
        played = play_engine(engine)
    right = difference(played.logits, setup.expected(policy, label))
    wrong = difference(played.logits, setup.expected(WRONG[policy], label))
    assert right < TOLERANCE
    assert wrong > (NOTICEABLE if label != "zero" else -1)
    assert played.cached == (REUSED_ALONE if policy == "nonshared" else REUSED)


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize(("policy", "schedule"), IN_ORDER)
def test_logits_follow_the_definition(
    llama: Setup, policy: str, schedule: str | None, label: str
) -> None:
    follows_the_definition(llama, policy, schedule, label)


@pytest.mark.parametrize("kind", OTHER_KINDS)
@pytest.mark.parametrize(("policy", "schedule"), IN_ORDER)
def test_logits_follow_the_definition_on_every_architecture(
    setup_of: SetupOf, kind: str, policy: str, schedule: str | None
) -> None:
    follows_the_definition(setup_of(kind), policy, schedule, "qv")


@pytest.mark.parametrize("kind", KEY_LORA_KINDS)
@pytest.mark.parametrize(("policy", "schedule"), KEY_LORA_METHODS)
def test_key_lora_follows_the_definition_where_keys_are_windowed_biased_or_capped(
    setup_of: SetupOf, kind: str, policy: str, schedule: str | None
) -> None:
    follows_the_definition(setup_of(kind), policy, schedule, "qkvo")


@pytest.mark.parametrize("label", ["qv", "patterns", "some_layers", "mixed"])
@pytest.mark.parametrize(("policy", "schedule"), SHARED_METHODS)
def test_stored_tensors_follow_the_definition(
    llama: Setup, policy: str, schedule: str | None, label: str
) -> None:
    with llama.engine(policy, schedule, llama.adapters(label)) as engine:
        play_engine(engine)
        while engine.idle_step():
            pass
        ours = stored(engine, only_trajectory(engine))
    state = llama.reference(policy, llama.adapters(label))
    play_reference(state)
    assert stored_difference(ours, stored_by_reference(state.caches())) < TOLERANCE


def test_nonshared_stores_the_full_keys_and_values_of_each_agent(llama: Setup) -> None:
    engine, state = llama.engine("nonshared"), llama.reference("nonshared")
    play_engine(engine)
    play_reference(state)
    by_writer = {item.runs[0].writer.name: item for item in engine.store.trajectories}
    assert set(by_writer) == {"plan", "action", "reflect", "base"}
    for name, trajectory in by_writer.items():
        seen = state.seen_by(None if name == "base" else name)
        length = trajectory.length
        assert (
            difference([k[:, :length] for k in trajectory.base.k], [k[:, :length] for k in seen.k])
            < TOLERANCE
        )
        assert (
            difference([v[:, :length] for v in trajectory.base.v], [v[:, :length] for v in seen.v])
            < TOLERANCE
        )


@pytest.mark.parametrize(("policy", "schedule"), METHODS)
def test_decoded_tokens_follow_the_definition(
    llama: Setup, policy: str, schedule: str | None
) -> None:
    state, prompt, hits = llama.reference(policy), [], []
    with llama.engine(policy, schedule) as engine:
        for agent, new, output in script(STEPS):
            prompt += new
            out = engine.generate(
                agent, prompt, max_tokens=len(output), ignore_eos=True, logprobs=20
            )
            assert len(out.token_ids) == len(output)
            assert logprob_difference(out, answer(state, agent, prompt, out.token_ids)) < TOLERANCE
            hits.append(out.usage.cached_tokens)
            prompt += out.token_ids
    assert hits == (REUSED_ALONE if policy == "nonshared" else REUSED)


@pytest.mark.parametrize(
    ("policy", "schedule", "prefill_chunk"),
    [(*method, chunk) for method in METHODS for chunk in (3, 7)]
    + [(*METHODS[3], 1), (*METHODS[5], 1)],
)
def test_prefill_in_chunks_changes_nothing(
    llama: Setup, policy: str, schedule: str | None, prefill_chunk: int
) -> None:
    with llama.engine(policy, schedule, prefill_chunk=prefill_chunk) as engine:
        played = play_engine(engine)
    assert difference(played.logits, llama.expected(policy)) < TOLERANCE
    assert played.cached[-1] > 0


@pytest.mark.parametrize("keep", [40, 19, 3])
@pytest.mark.parametrize(("policy", "schedule"), METHODS)
def test_a_prompt_that_turns_off_truncates_and_follows_the_definition(
    llama: Setup, policy: str, schedule: str | None, keep: int
) -> None:
    state = llama.reference(policy)
    play_reference(state)
    state.truncate(keep)
    with llama.engine(policy, schedule) as engine:
        played = play_engine(engine)
        prompt = [*played.token_ids[:keep], other_than(played.token_ids[keep]), *tokens(4, seed=5)]
        for agent, output in (("action", tokens(3, seed=6)), ("plan", tokens(1, seed=7))):
            before = engine.stats().reused_tokens
            logits = engine.score(agent, prompt, output)
            assert engine.stats().reused_tokens > before
            assert difference([logits], [answer(state, agent, prompt, output)]) < TOLERANCE
            prompt = [*prompt, *output, *tokens(2, seed=8)]
        assert len(engine.sessions()) == (4 if policy == "nonshared" else 1)


@pytest.mark.parametrize(("policy", "schedule"), METHODS)
def test_both_branches_of_a_fork_follow_the_definition(
    llama: Setup, policy: str, schedule: str | None
) -> None:
    trunk = tokens(330, seed=1)
    branch = [*trunk[:50], other_than(trunk[50]), *tokens(5, seed=2)]
    with llama.engine(policy, schedule) as engine:
        engine.score("plan", trunk[:-2], trunk[-2:])
        forked = engine.score("plan", branch, tokens(3, seed=3))
        assert engine.stats().lookups["diverged"] == 1
        assert engine.stats().reused_tokens == 50
        kept = engine.score("plan", [*trunk, *tokens(4, seed=4)], tokens(2, seed=5))
        assert engine.stats().reused_tokens == 50 + len(trunk) - 1
        read = engine.score("action", [*trunk, *tokens(7, seed=4)], tokens(2, seed=5))

    left = llama.reference(policy)
    answer(left, "plan", trunk[:-2], trunk[-2:])
    expected = answer(left, "plan", [*trunk, *tokens(4, seed=4)], tokens(2, seed=5))
    assert difference([kept], [expected]) < TOLERANCE
    left.truncate(len(trunk) + 4)
    expected = answer(left, "action", [*trunk, *tokens(7, seed=4)], tokens(2, seed=5))
    assert difference([read], [expected]) < TOLERANCE

    right = llama.reference(policy)
    answer(right, "plan", trunk[:-2], trunk[-2:])
    right.truncate(50)
    assert difference([forked], [answer(right, "plan", branch, tokens(3, seed=3))]) < TOLERANCE


def test_what_a_reader_wrote_itself_is_exact_under_prelrshared(llama: Setup) -> None:
    steps = tuple(type(step)("plan", step.prompt, step.output) for step in STEPS)
    played = play_engine(llama.engine("prelrshared"), steps)
    assert difference(played.logits, llama.expected("nonshared", steps=steps)) < TOLERANCE
    assert difference(played.logits, llama.expected("rebaseshared", steps=steps)) > NOTICEABLE
    assert played.cached == REUSED


@pytest.mark.parametrize("label", ["shared_a", "shared_a_qkvo"])
@pytest.mark.parametrize("policy", ["prelrshared", "baselrshared"])
def test_adapters_with_equal_a_share_one_strip(llama: Setup, policy: str, label: str) -> None:
    engine = llama.engine(policy, adapters=llama.adapters(label))
    played = play_engine(engine)
    assert difference(played.logits, llama.expected("baselrshared", label)) < TOLERANCE
    assert difference(played.logits, llama.expected("nonshared", label)) > NOTICEABLE
    assert played.cached == REUSED
    (strip,) = engine.sessions()[0].strips
    assert strip.readers == ("plan", "action", "reflect")


def test_adapters_with_other_a_have_a_strip_each(llama: Setup) -> None:
    engine = llama.engine("prelrshared")
    play_engine(engine)
    assert [strip.readers for strip in engine.sessions()[0].strips] == [
        ("plan",),
        ("action",),
        ("reflect",),
    ]
