"""A comparison equals one made of the slow reference's logits; costs equal counts by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from precache.errors import PolicyNotAllowedError, UnknownPolicyError
from precache.fidelity import FidelityError
from precache.fidelity.recordings import Recording
from precache.fidelity.replay import Comparison, compare
from precache.fidelity.summary import Summary
from tests.engine.setup import AGENTS, Setup
from tests.engine.trajectories import Step, answer
from tests.fidelity.conftest import recorded

POLICIES = ("fullshared", "baseshared", "prelrshared", "rebaseshared")
LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB, RANK = 4, 64, 96, 4, 2, 16, 128, 4


@pytest.fixture(scope="module")
def comparison(setup: Setup, recordings: list[Recording]) -> Comparison:
    with setup.engine() as engine:
        return compare(engine, recordings, POLICIES)


def reference_logits(
    setup: Setup, policy: str, recording: Recording, label: str
) -> Iterator[Tensor]:
    state = setup.reference(policy, setup.adapters(label))
    ids = list(recording.token_ids)
    for turn in recording.turns:
        yield answer(state, turn.role, ids[: turn.start], ids[turn.start : turn.end])


def reference_kl(setup: Setup, policy: str, recording: Recording, role: str, label: str) -> float:
    total = 0.0
    pairs = zip(
        recording.turns,
        reference_logits(setup, "nonshared", recording, label),
        reference_logits(setup, policy, recording, label),
        strict=True,
    )
    for turn, exact, ours in pairs:
        if turn.role == role:
            p, q = exact.softmax(-1), ours.softmax(-1)
            total += float((p * (p / q).log()).sum())
    return total


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("role", AGENTS)
def test_kl_is_that_of_the_reference(
    setup: Setup, comparison: Comparison, recordings: list[Recording], policy: str, role: str
) -> None:
    for recording, scores in zip(recordings, comparison.runs[policy].scores, strict=True):
        expected = reference_kl(setup, policy, recording, role, "qv")
        assert scores[role].kl == pytest.approx(expected, rel=1e-3, abs=1e-4)
        assert expected > 0.01  # so that an engine that shares nothing would be noticed


def test_baselrshared_is_compared_where_a_is_shared(
    setup: Setup, recordings: list[Recording]
) -> None:
    with setup.engine(adapters=setup.adapters("shared_a")) as engine:
        found = compare(engine, recordings[:1], ["baselrshared"])
    for role in AGENTS:
        expected = reference_kl(setup, "baselrshared", recordings[0], role, "shared_a")
        assert found.runs["baselrshared"].scores[0][role].kl == pytest.approx(expected, rel=1e-3)


def test_the_other_figures_are_those_of_the_reference(
    setup: Setup, comparison: Comparison, recordings: list[Recording]
) -> None:
    recording = recordings[0]
    exact = torch.cat(list(reference_logits(setup, "nonshared", recording, "qv")))
    ours = torch.cat(list(reference_logits(setup, "rebaseshared", recording, "qv")))
    said = [recording.token_ids[p] for turn in recording.turns for p in range(turn.start, turn.end)]
    scores = comparison.runs["rebaseshared"].scores[0]
    assert sum(s.agreed for s in scores.values()) == int(
        (exact.argmax(-1) == ours.argmax(-1)).sum()
    )
    nll = -float(ours.log_softmax(-1)[torch.arange(len(said)), torch.tensor(said)].sum())
    assert sum(s.nll for s in scores.values()) == pytest.approx(nll, rel=1e-4)
    largest = float((exact - ours).abs().max())
    assert max(s.max_dlogit for s in scores.values()) == pytest.approx(largest, abs=1e-3)


def test_nonshared_comes_first_and_differs_from_itself_by_nothing(comparison: Comparison) -> None:
    assert tuple(comparison.runs) == ("nonshared", *POLICIES)
    rows = {(row.policy, row.role): row for row in Summary(comparison).rows()}
    assert rows["nonshared", "all"].kl == 0.0
    assert rows["nonshared", "all"].top1_agreement == 1.0
    assert rows["nonshared", "all"].tokens == 3 * 21
    assert rows["nonshared", "plan"].tokens == 3 * 8


def test_a_reader_that_wrote_everything_loses_nothing_under_prelrshared(setup: Setup) -> None:
    alone = recorded(0, (Step("plan", 9, 4), Step("plan", 3, 5)))
    with setup.engine() as engine:
        found = compare(engine, [alone], ["prelrshared", "rebaseshared"])
    assert found.runs["prelrshared"].scores[0]["plan"].kl < 1e-9
    assert found.runs["rebaseshared"].scores[0]["plan"].kl > 0.01


# -- costs ---------------------------------------------------------------------------------------


def flops_of_fullshared(recording: Recording) -> int:
    """By hand: q, k, v, o, the MLP, LoRA of q and v, attention, the head; the last layer for rows with logits."""
    kv = 2 * 2 * HIDDEN * KV_HEADS * HEAD_DIM + 2 * RANK * (HIDDEN + KV_HEADS * HEAD_DIM)
    rest = 2 * 2 * HIDDEN * HIDDEN + 3 * 2 * HIDDEN * INNER + 2 * RANK * 2 * HIDDEN
    total, done = 0, 0
    for turn in recording.turns:
        for position in range(done, turn.end - 1):
            attention = 4 * HEADS * HEAD_DIM * (position + 1)
            has_logits = position >= turn.start - 1
            total += LAYERS * kv + (LAYERS - 1 + has_logits) * (rest + attention)
            total += has_logits * 2 * HIDDEN * VOCAB
        done = turn.end - 1
    return total


def flops_of_reading_strips(recording: Recording) -> int:
    """P z for every key seen, then times B, in every head: all rows but the last layer's without logits."""
    total, done = 0, 0
    for turn in recording.turns:
        for position in range(done, turn.end - 1):
            layers = LAYERS - 1 + (position >= turn.start - 1)
            total += layers * HEADS * 2 * RANK * (position + 1 + HEAD_DIM)
        done = turn.end - 1
    return total


def test_flops_are_counted(comparison: Comparison, recordings: list[Recording]) -> None:
    costs = {row.policy: row for row in Summary(comparison).costs()}
    expected = sum(flops_of_fullshared(recording) for recording in recordings)
    assert costs["fullshared"].flops == expected
    # prelrshared: v is not folded (no A and B of one adapter), X A of all three is stored, and the strip is read
    rows = LAYERS * sum(recording.num_run for recording in recordings)
    strips = 2 * HIDDEN * 3 * RANK
    folded = 2 * RANK * (HIDDEN + KV_HEADS * HEAD_DIM)
    reading = sum(flops_of_reading_strips(recording) for recording in recordings)
    assert costs["prelrshared"].flops == expected + rows * (strips - folded) + reading


def test_tokens_run_and_recomputed(comparison: Comparison, recordings: list[Recording]) -> None:
    costs = {row.policy: row for row in Summary(comparison).costs()}
    needed = sum(recording.num_run for recording in recordings)
    alone = sum(  # every agent runs all up to its own last turn
        max(turn.end for turn in recording.turns if turn.role == role) - 1
        for recording in recordings
        for role in recording.roles
    )
    assert costs["fullshared"].tokens_run == costs["prelrshared"].tokens_run == needed
    assert costs["nonshared"].tokens_run == costs["baseshared"].tokens_run == alone
    assert costs["rebaseshared"].tokens_run == 2 * needed
    assert costs["rebaseshared"].tokens_recomputed == needed
    assert costs["prelrshared"].tokens_recomputed == 0
    assert costs["nonshared"].flops_ratio == 1.0
    assert {row.kv_refreshed for row in costs.values()} == {0.0}
    assert costs["fullshared"].cache_bytes < costs["prelrshared"].cache_bytes
    assert costs["prelrshared"].cache_bytes_ratio < 0.6


def test_replaced_keys_and_values_are_counted_in_tokens(
    setup: Setup, recordings: list[Recording]
) -> None:
    with setup.engine(recompute_share=0.5) as engine:
        found = compare(engine, recordings[:1], ["droidspeak"])
    (row,) = [row for row in Summary(found).costs() if row.policy == "droidspeak"]
    # two of four layers, for what others ran before action's, reflect's and plan's first and next turns
    new_to = {"action": [21, 40 - 26], "reflect": [26], "plan": [15]}
    assert row.kv_refreshed == sum(sum(tokens) for tokens in new_to.values()) / 2


# -- mistakes ------------------------------------------------------------------------------------


def test_mistakes_are_told_before_anything_runs(setup: Setup, recordings: list[Recording]) -> None:
    with setup.engine() as engine:
        with pytest.raises(UnknownPolicyError):
            compare(engine, recordings, ["sharing"])
        with pytest.raises(PolicyNotAllowedError, match="baselrshared"):
            compare(engine, recordings, ["baselrshared"])
        engine.remove_adapter("reflect")
        with pytest.raises(FidelityError, match="reflect"):
            compare(engine, recordings, ["prelrshared"])
        assert engine.stats().reused_tokens == 0
