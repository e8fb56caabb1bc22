"""Results -> one row per policy and level, and the drop against `nonshared`. Owns the figures, not their print."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from precache.agents.results import EpisodeKey, EpisodeResult
from precache.agents.statistics import Estimate, estimate

REFERENCE = "nonshared"
ALL_LEVELS = "all"


@dataclass(frozen=True, slots=True)
class NaturalRow:
    """One policy on one level in natural mode. `drops`: nonshared minus policy, paired by question.

    `steps`, `turns` and `tokens` (the trajectory's length) are means over episodes, the other costs over turns;
    `tokens`, `tokens_per_s` and `cached_share` are None where the endpoint reports no usage.
    """

    policy: str
    level: str
    episodes: int
    scores: Mapping[str, Estimate]
    drops: Mapping[str, Estimate]
    steps: float
    turns: float
    tokens: float | None
    ttft_s: float
    tokens_per_s: float | None
    cached_share: float | None
    malformed: Mapping[str, int]
    outcomes: Mapping[str, int]
    tools: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ForcedRow:
    """One policy on one level, made to say recorded text: what its agents would have said.

    Shares are estimates over episodes. `nll_by_role` is over all tokens that a role wrote; it is empty, and `nll` and
    `top1` are None, over HTTP.
    """

    policy: str
    level: str
    episodes: int
    turns_kept: Estimate
    answers_kept: Estimate
    nll: Estimate | None
    top1: Estimate | None
    nll_by_role: Mapping[str, float]
    drops: Mapping[str, Estimate]
    seconds_per_turn: float


def natural_rows(results: Iterable[EpisodeResult]) -> list[NaturalRow]:
    """Return the rows of natural mode: every level, and all levels together if several."""
    groups = _groups(result for result in results if result.key.mode == "natural")
    return [
        _natural_row(key, group, groups.get((REFERENCE, key[1]))) for key, group in groups.items()
    ]


def forced_rows(results: Iterable[EpisodeResult]) -> list[ForcedRow]:
    """Return the rows of forced mode, likewise. Episodes that were refused are left out."""
    groups = _groups(r for r in results if r.key.mode == "forced" and r.episode["roles"])
    return [
        _forced_row(key, group, groups.get((REFERENCE, key[1]))) for key, group in groups.items()
    ]


_Group = dict[EpisodeKey, EpisodeResult]


def _groups(results: Iterable[EpisodeResult]) -> dict[tuple[str, str], _Group]:
    """Results by policy and level, then by their key without the policy."""
    groups: dict[tuple[str, str], _Group] = defaultdict(dict)
    for result in results:
        for level in (result.key.level, ALL_LEVELS):
            groups[result.key.policy, level][result.key._replace(policy="")] = result
    policies = dict.fromkeys(policy for policy, _ in groups)
    levels = dict.fromkeys(level for _, level in groups if level != ALL_LEVELS)
    order = [*levels, ALL_LEVELS] if len(levels) != 1 else list(levels)
    return {(p, x): groups[p, x] for p in policies for x in order if (p, x) in groups}


def _natural_row(key: tuple[str, str], group: _Group, reference: _Group | None) -> NaturalRow:
    episodes = [result.episode for result in group.values()]
    turns = [turn for episode in episodes for turn in episode["turns"]]
    names = dict.fromkeys(name for episode in episodes for name in episode["scores"])
    scores = {name: _score(name) for name in names}
    usages = [turn["usage"] for turn in turns if turn["usage"] is not None]
    return NaturalRow(
        policy=key[0],
        level=key[1],
        episodes=len(group),
        scores=_estimates(group, scores),
        drops=_drops(group, reference, scores, key[0]),
        steps=_mean([episode["steps"] for episode in episodes]),
        turns=_mean([len(episode["turns"]) for episode in episodes]),
        tokens=_length(episodes),
        ttft_s=_mean([turn["timings"]["ttft_s"] for turn in turns]),
        tokens_per_s=_tokens_per_s(turns),
        cached_share=_ratio(usages, "cached_tokens", "prompt_tokens"),
        malformed=_count(kind for e in episodes for kind in Counter(e["malformed"]).elements()),
        outcomes=_count(episode["outcome"] for episode in episodes),
        tools=_count(call["status"] for episode in episodes for call in episode["tool_calls"]),
    )


def _forced_row(key: tuple[str, str], group: _Group, reference: _Group | None) -> ForcedRow:
    shares = {
        "turns_kept": _share("turns_kept", "turns"),
        "answers_kept": _share("answers_kept", "answers"),
    }
    logprobs = {"nll": _share("nll", "tokens"), "top1": _share("top1", "tokens")}
    known = all(_total(result, "tokens") for result in group.values())
    measured = shares | logprobs if known else shares
    estimates = _estimates(group, measured)
    turns = sum(_total(result, "turns") for result in group.values())
    return ForcedRow(
        policy=key[0],
        level=key[1],
        episodes=len(group),
        turns_kept=estimates["turns_kept"],
        answers_kept=estimates["answers_kept"],
        nll=estimates.get("nll"),
        top1=estimates.get("top1"),
        nll_by_role=_nll_by_role(group.values()) if known else {},
        drops=_drops(group, reference, measured, key[0]),
        seconds_per_turn=sum(_total(r, "seconds") for r in group.values()) / turns,
    )


def _nll_by_role(results: Iterable[EpisodeResult]) -> dict[str, float]:
    tokens: Counter[str] = Counter()
    nll: dict[str, float] = defaultdict(float)
    for result in results:
        for role, totals in result.episode["roles"].items():
            tokens[role] += totals["tokens"]
            nll[role] += totals["nll"]
    return {role: nll[role] / tokens[role] for role in nll}


_Score = Callable[[EpisodeResult], float]
_Span = tuple[float, float] | None


def _span(name: str, *, drop: bool) -> _Span:
    """What a score, or a drop of it, can be at all. A log-probability has no such bounds."""
    if name == "nll":
        return None
    return (-1.0, 1.0) if drop else (0.0, 1.0)


def _score(name: str) -> _Score:
    return lambda result: float(result.episode["scores"][name])


def _share(name: str, of: str) -> _Score:
    return lambda result: _total(result, name) / max(_total(result, of), 1)


def _total(result: EpisodeResult, name: str) -> float:
    return float(sum(role[name] for role in result.episode["roles"].values()))


def _drops(
    group: _Group, reference: _Group | None, scores: Mapping[str, _Score], policy: str
) -> dict[str, Estimate]:
    """Return nonshared minus policy, on the episodes that both have played."""
    common = [key for key in group if reference is not None and key in reference]
    if reference is None or policy == REFERENCE or not common:
        return {}
    return {
        name: _estimate(
            {key: score(reference[key]) - score(group[key]) for key in common},
            _span(name, drop=True),
        )
        for name, score in scores.items()
    }


def _estimates(group: _Group, scores: Mapping[str, _Score]) -> dict[str, Estimate]:
    return {
        name: _estimate(
            {key: score(result) for key, result in group.items()}, _span(name, drop=False)
        )
        for name, score in scores.items()
    }


def _estimate(values: Mapping[EpisodeKey, float], span: _Span) -> Estimate:
    """Estimate over questions; those that have not all their repeats yet count by the first ones."""
    table: dict[tuple[str, str], list[float]] = defaultdict(list)
    for key, value in sorted(values.items(), key=lambda item: item[0].repeat):
        table[key.level, key.question_id].append(value)
    repeats = min(len(row) for row in table.values())
    return estimate([row[:repeats] for row in table.values()], span)


def _length(episodes: Sequence[Mapping[str, Any]]) -> float | None:
    """Mean tokens of the trajectories, as the last turn of each counted them."""
    last = [episode["turns"][-1]["usage"] for episode in episodes if episode["turns"]]
    counted = [usage for usage in last if usage is not None]
    totals = [usage["prompt_tokens"] + usage["completion_tokens"] for usage in counted]
    return _mean(totals) if totals else None


def _tokens_per_s(turns: Sequence[Mapping[str, Any]]) -> float | None:
    counted = [turn for turn in turns if turn["usage"] is not None]
    tokens = sum(turn["usage"]["completion_tokens"] for turn in counted)
    seconds = sum(turn["timings"]["total_s"] for turn in counted)
    return tokens / seconds if tokens and seconds else None


def _ratio(usages: Sequence[Mapping[str, int]], part: str, whole: str) -> float | None:
    total = sum(usage[whole] for usage in usages)
    return sum(usage[part] for usage in usages) / total if total else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _count(names: Iterable[str]) -> dict[str, int]:
    return dict(Counter(names).most_common())
