"""Figures of logits, against sums written out."""

from __future__ import annotations

import math

import pytest
import torch

from precache.fidelity.scores import Score, score


def softmax(row: list[float]) -> list[float]:
    total = sum(math.exp(x) for x in row)
    return [math.exp(x) / total for x in row]


def test_a_score_is_what_its_formulas_say() -> None:
    exact = [[0.5, 2.0, -1.0], [0.0, 1.0, 0.3]]
    ours = [[0.1, 1.5, 3.0], [0.2, 0.9, -0.3]]
    said = [2, 0]
    found = score(torch.tensor(exact), torch.tensor(ours), said)
    p, q = [softmax(row) for row in exact], [softmax(row) for row in ours]
    kl = sum(
        a * math.log(a / b) for x, y in zip(p, q, strict=True) for a, b in zip(x, y, strict=True)
    )
    assert found.kl == pytest.approx(kl, rel=1e-5)
    assert found.nll == pytest.approx(-math.log(q[0][2]) - math.log(q[1][0]), rel=1e-5)
    assert found.max_dlogit == pytest.approx(4.0)
    assert (found.tokens, found.agreed) == (2, 1)  # the second row's largest is the same
    reverse = score(torch.tensor(ours), torch.tensor(exact), said)
    assert reverse.kl != pytest.approx(found.kl, rel=1e-2)


def test_equal_logits_have_no_divergence() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)) * 9
    found = score(logits, logits.clone(), [0] * 5)
    assert abs(found.kl) < 1e-12
    assert (found.agreed, found.max_dlogit) == (5, 0.0)


def test_scores_add_up() -> None:
    total = Score(2, 0.5, 1, 3.0, 4.0) + Score(1, 0.25, 1, 1.0, 2.0)
    assert total == Score(3, 0.75, 2, 4.0, 4.0)
