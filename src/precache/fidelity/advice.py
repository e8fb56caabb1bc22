"""Which policy for these roles? A sentence and the interval behind it, or "undecided".

Candidates are the policies that save compute against ``nonshared`` (SAVES). The one with the lowest KL is recommended
only if the paired interval of the difference to every other candidate is clear of zero.
"""

from __future__ import annotations

from dataclasses import dataclass

from precache.fidelity.intervals import Interval
from precache.fidelity.replay import EXACT
from precache.fidelity.summary import ALL_ROLES, Summary

SAVES = 0.9  # of nonshared's FLOPs; baseshared runs all tokens for every agent and is no way to save compute
MIN_TRAJECTORIES = 5  # a percentile bootstrap over fewer is far too narrow


@dataclass(frozen=True)
class Advice:
    """``policy`` is None where the data do not decide.

    ``difference`` is how much more KL ``runner_up`` has than the best, in nats per token. ``tied`` are the policies
    that are not told apart, the one with the lowest KL first.
    """

    role: str
    policy: str | None
    tied: tuple[str, ...]
    runner_up: str | None
    difference: Interval | None
    sentence: str


def advise(summary: Summary) -> list[Advice]:
    """For all roles together, which share one cache and so one policy; then for each role as a reader."""
    return [_advise(summary, role) for role in (ALL_ROLES, *summary.roles)]


def _advise(summary: Summary, role: str) -> Advice:
    costs = {row.policy: row.flops_ratio for row in summary.costs()}
    candidates = [p for p in summary.policies if p != EXACT and costs[p] <= SAVES]
    if not candidates:
        return _none(role, (), "no compared policy saves compute on these trajectories")
    best, *others = sorted(candidates, key=lambda policy: summary.kl(policy, role).value)
    if summary.num_trajectories(role) < MIN_TRAJECTORIES:
        return _none(role, tuple(candidates), _too_few(summary, role))
    if not others:
        return _none(role, (best,), f"{best} is the only compared policy that saves compute")
    differences = {other: summary.kl_difference(other, best, role) for other in others}
    open_ones = [p for p, difference in differences.items() if not difference.excludes_zero()]
    runner_up = min(open_ones or others, key=lambda policy: differences[policy].value)
    difference = differences[runner_up]
    if open_ones:
        sentence = _undecided(summary, role, best, runner_up, difference, costs)
        return Advice(role, None, (best, *open_ones), runner_up, difference, sentence)
    sentence = _decided(summary, role, best, runner_up, difference)
    return Advice(role, best, (best,), runner_up, difference, sentence)


def _none(role: str, tied: tuple[str, ...], reason: str) -> Advice:
    return Advice(role, None, tied, None, None, f"undecided for {_who(role)}: {reason}")


def _too_few(summary: Summary, role: str) -> str:
    count = summary.num_trajectories(role)
    return f"{count} trajectories, an interval needs at least {MIN_TRAJECTORIES}"


def _decided(summary: Summary, role: str, best: str, runner_up: str, difference: Interval) -> str:
    return (
        f"{best} for {_who(role)}: KL {summary.kl(best, role)} nats per token, "
        f"{runner_up} has {difference} more; {_why(summary, role, best, runner_up)}"
    )


def _undecided(
    summary: Summary,
    role: str,
    best: str,
    runner_up: str,
    difference: Interval,
    costs: dict[str, float],
) -> str:
    return (
        f"undecided for {_who(role)} between {best} (KL {summary.kl(best, role)}) and {runner_up}: "
        f"the difference of {difference} nats per token is not clear of zero; "
        f"FLOPs over nonshared's are {costs[best]:.2f} and {costs[runner_up]:.2f}"
    )


def _why(summary: Summary, role: str, best: str, runner_up: str) -> str:
    """What the reader says itself decides how much of its own exact cache it can lose."""
    who = role if role != ALL_ROLES else max(summary.roles, key=summary.share_said)
    return (
        f"{who} wrote {summary.share_said(who):.0%} of the tokens said and loses "
        f"{summary.kl(runner_up, who)} under {runner_up}, {summary.kl(best, who)} under {best}"
    )


def _who(role: str) -> str:
    return "all roles together" if role == ALL_ROLES else role
