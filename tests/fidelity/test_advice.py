"""A recommendation needs an interval that is clear of zero, and says which."""

from __future__ import annotations

import pytest

from precache.fidelity.advice import Advice, advise
from precache.fidelity.cost import Cost
from precache.fidelity.recordings import RecordedTurn, Recording
from precache.fidelity.replay import Comparison, PolicyRun
from precache.fidelity.scores import Score
from precache.fidelity.summary import Summary

SAID = {"plan": 30, "action": 10}
COSTS = {"nonshared": 100, "baseshared": 96, "prelrshared": 40, "rebaseshared": 70}

Kls = dict[
    str, list[tuple[float, float]]
]  # policy -> nats per token of plan and action by trajectory


def advice_on(kls: Kls, role: str = "all") -> Advice:
    return next(item for item in advise(summary_of(kls)) if item.role == role)


def summary_of(kls: Kls) -> Summary:
    count = len(next(iter(kls.values())))
    turns = (RecordedTurn("plan", 1, 31), RecordedTurn("action", 31, 41))
    recordings = tuple(Recording(f"q{n}", tuple(range(41)), turns) for n in range(count))
    runs = {
        policy: PolicyRun(
            tuple(
                {
                    role: Score(SAID[role], kl * SAID[role])
                    for role, kl in zip(SAID, pair, strict=True)
                }
                for pair in pairs
            ),
            tuple(Cost(1, COSTS[policy], 0, 1) for _ in pairs),
        )
        for policy, pairs in {"nonshared": [(0.0, 0.0)] * count, **kls}.items()
    }
    return Summary(Comparison(recordings, runs, 1))


CLEAR: Kls = {
    "prelrshared": [(0.01, 0.10), (0.02, 0.12), (0.01, 0.09), (0.02, 0.11), (0.01, 0.10)],
    "rebaseshared": [(0.12, 0.05), (0.15, 0.06), (0.11, 0.05), (0.14, 0.06), (0.12, 0.04)],
}


def test_a_clear_difference_is_recommended_with_its_interval() -> None:
    found = advice_on(CLEAR)
    assert (found.policy, found.runner_up, found.tied) == (
        "prelrshared",
        "rebaseshared",
        ("prelrshared",),
    )
    assert found.difference is not None
    assert found.difference.low is not None
    assert found.difference.low > 0
    assert found.difference.rounded(4) in found.sentence
    assert "plan wrote 75% of the tokens said and loses 0.1280" in found.sentence


def test_differences_of_every_two_policies_are_paired() -> None:
    rows = {(row.policy, row.other, row.role): row for row in summary_of(CLEAR).differences()}
    assert set(rows) == {
        ("prelrshared", "rebaseshared", role) for role in ("all", "plan", "action")
    }
    found = rows["prelrshared", "rebaseshared", "action"].kl
    assert found.value == pytest.approx((0.52 - 0.26) / 5)
    assert found.low is not None
    assert found.high is not None
    assert 0.04 <= found.low < found.value < found.high <= 0.06


def test_each_role_has_its_own_answer() -> None:
    assert advice_on(CLEAR, "plan").policy == "prelrshared"
    found = advice_on(CLEAR, "action")
    assert found.policy == "rebaseshared"
    assert found.sentence.startswith("rebaseshared for action: KL 0.05")


def test_a_difference_that_may_be_none_is_undecided() -> None:
    swapped = [CLEAR["rebaseshared"][0], *CLEAR["prelrshared"][1:3], *CLEAR["rebaseshared"][3:]]
    other = [CLEAR["prelrshared"][0], *CLEAR["rebaseshared"][1:3], *CLEAR["prelrshared"][3:]]
    found = advice_on({"prelrshared": swapped, "rebaseshared": other})
    assert found.policy is None
    assert set(found.tied) == {"prelrshared", "rebaseshared"}
    assert found.sentence.startswith("undecided for all roles together between")
    assert found.difference is not None
    assert found.difference.rounded(4) in found.sentence
    assert "0.40" in found.sentence
    assert "0.70" in found.sentence


def test_few_trajectories_decide_nothing() -> None:
    found = advice_on({policy: pairs[:4] for policy, pairs in CLEAR.items()})
    assert found.policy is None
    assert found.difference is None
    assert "4 trajectories, an interval needs at least 5" in found.sentence


def test_what_saves_no_compute_is_no_candidate() -> None:
    found = advice_on({"baseshared": [(0.0, 0.0)] * 5, **CLEAR})
    assert found.policy == "prelrshared"
    alone = advice_on({"baseshared": [(0.0, 0.0)] * 5})
    assert alone.policy is None
    assert "no compared policy saves compute" in alone.sentence
    assert "only compared policy" in advice_on({"prelrshared": CLEAR["prelrshared"]}).sentence
