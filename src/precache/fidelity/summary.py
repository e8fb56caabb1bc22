"""A comparison -> rows of figures with their intervals. Arithmetic only."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

from precache.fidelity.cost import Cost
from precache.fidelity.intervals import Interval, Resampling
from precache.fidelity.replay import EXACT, Comparison
from precache.fidelity.scores import Score

ALL_ROLES = "all"


@dataclass(frozen=True)
class FidelityRow:
    """One policy and one reading role (``all``: every role). Per token said; ``_low`` and ``_high`` are 95 % intervals.

    ``kl`` is KL(nonshared || policy) in nats, ``nll`` that of the recorded text in nats.
    """

    policy: str
    role: str
    trajectories: int
    tokens: int
    kl: float
    kl_low: float | None
    kl_high: float | None
    top1_agreement: float
    top1_agreement_low: float | None
    top1_agreement_high: float | None
    nll: float
    nll_low: float | None
    nll_high: float | None
    max_dlogit: float
    max_dlogit_low: float | None
    max_dlogit_high: float | None


@dataclass(frozen=True)
class CostRow:
    """One policy's work over all trajectories, and the bytes cached at the end of one, on average.

    ``tokens_run`` are passes of a token through the whole model (layers count in part), ``tokens_recomputed`` those
    beyond the first of each token. ``kv_refreshed`` are tokens whose cached k and v a reader replaced by its own, in
    all layers (again in part). The ratios are over ``nonshared``.
    """

    policy: str
    tokens: int
    tokens_run: float
    tokens_recomputed: float
    kv_refreshed: float
    flops: int
    flops_ratio: float
    cache_bytes: float
    cache_bytes_ratio: float


@dataclass(frozen=True)
class DifferenceRow:
    """``policy`` minus ``other`` on the same trajectories, per token said, each with its paired 95 % interval."""

    policy: str
    other: str
    role: str
    kl: Interval
    top1_agreement: Interval
    nll: Interval


class Summary:
    """The figures of a comparison, by policy and role."""

    def __init__(self, comparison: Comparison, seed: int = 0) -> None:
        self.comparison = comparison
        self.roles = comparison.roles
        self.policies = tuple(comparison.runs)
        self._resampling = Resampling(len(comparison.recordings), seed)

    def rows(self) -> list[FidelityRow]:
        """Every policy, over all roles and for each of them."""
        return [self._row(policy, role) for policy in self.policies for role in self._all_roles()]

    def costs(self) -> list[CostRow]:
        exact = _total(self.comparison, EXACT)
        return [self._cost_row(policy, exact) for policy in self.policies]

    def differences(self) -> list[DifferenceRow]:
        """Every two policies, but nonshared: from it the KL is the distance."""
        pairs = combinations([policy for policy in self.policies if policy != EXACT], 2)
        return [
            DifferenceRow(
                policy,
                other,
                role,
                self._difference(policy, other, role, lambda score: score.kl),
                self._difference(policy, other, role, lambda score: score.agreed),
                self._difference(policy, other, role, lambda score: score.nll),
            )
            for policy, other in pairs
            for role in self._all_roles()
        ]

    def kl(self, policy: str, role: str) -> Interval:
        """Nats per token."""
        return self._mean(policy, role, lambda score: score.kl)

    def kl_difference(self, policy: str, other: str, role: str) -> Interval:
        """How much more KL ``policy`` has than ``other``, on the same trajectories."""
        return self._difference(policy, other, role, lambda score: score.kl)

    def share_said(self, role: str) -> float:
        """The part of all tokens said that this role said."""
        return self.tokens_said(role) / self.tokens_said(ALL_ROLES)

    def tokens_said(self, role: str) -> int:
        return sum(score.tokens for score in self._scores(EXACT, role))

    def num_trajectories(self, role: str) -> int:
        """Trajectories in which the role says something."""
        return sum(score.tokens > 0 for score in self._scores(EXACT, role))

    def _all_roles(self) -> tuple[str, ...]:
        return (ALL_ROLES, *self.roles)

    def _row(self, policy: str, role: str) -> FidelityRow:
        kl = self.kl(policy, role)
        agreement = self._mean(policy, role, lambda score: score.agreed)
        nll = self._mean(policy, role, lambda score: score.nll)
        said = self._scores(policy, role)
        largest = self._resampling.maximum(
            [score.max_dlogit if score.tokens else -math.inf for score in said]
        )
        return FidelityRow(
            policy, role, self.num_trajectories(role), self.tokens_said(role),
            *kl, *agreement, *nll, *largest,
        )  # fmt: skip

    def _cost_row(self, policy: str, exact: Cost) -> CostRow:
        comparison, total = self.comparison, _total(self.comparison, policy)
        needed = sum(recording.num_run for recording in comparison.recordings)
        tokens_run = total.layer_rows / comparison.num_layers
        return CostRow(
            policy,
            tokens=needed,
            tokens_run=tokens_run,
            tokens_recomputed=tokens_run - needed,
            kv_refreshed=total.refreshed / comparison.num_layers,
            flops=total.flops,
            flops_ratio=total.flops / exact.flops,
            cache_bytes=total.cache_bytes / len(comparison.recordings),
            cache_bytes_ratio=total.cache_bytes / exact.cache_bytes,
        )

    def _mean(self, policy: str, role: str, value: Callable[[Score], float]) -> Interval:
        scores = self._scores(policy, role)
        return self._resampling.mean(
            [value(score) for score in scores], [score.tokens for score in scores]
        )

    def _difference(
        self, policy: str, other: str, role: str, value: Callable[[Score], float]
    ) -> Interval:
        ours, theirs = self._scores(policy, role), self._scores(other, role)
        differences = [value(a) - value(b) for a, b in zip(ours, theirs, strict=True)]
        return self._resampling.mean(differences, [score.tokens for score in ours])

    def _scores(self, policy: str, role: str) -> list[Score]:
        """One score a trajectory."""
        runs = self.comparison.runs[policy].scores
        if role == ALL_ROLES:
            return [sum(scores.values(), Score()) for scores in runs]
        return [scores.get(role, Score()) for scores in runs]


def _total(comparison: Comparison, policy: str) -> Cost:
    return sum(comparison.runs[policy].costs, Cost())
