"""Runs to rows: medians, spreads, and ratios taken within each repeat. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from precache.bench.player import Run
from precache.bench.spread import Spread, spread_of
from precache.bench.trace import Trace

STOCK = "stock-peft"
LLAMA_CPP = "llama-cpp"
PEERS = (STOCK, LLAMA_CPP)  # rows that are not policies of the engine
REFERENCES = ("nonshared", "fullshared", *PEERS)


class RowKey(NamedTuple):
    """What a row measures."""

    policy: str
    schedule: str | None = None


@dataclass(frozen=True)
class Row:
    """One policy at one length. The plain figures are medians over the repeats; ``spread`` has their range.

    ``total_ttft_s`` sums the time to first token over the turns, ``wall_s`` everything, deferred passes included.
    ``tokens_per_s`` is the finished trajectory's tokens over ``wall_s``, ``decode_tokens_per_s`` counts decode steps
    only. ``ttft_cpu_s`` and ``decode_cpu_s`` are processor time of the same stretches. ``neutral_s`` is neutral passes
    after turns, ``neutral_wait_s`` those a turn waited for (part of its TTFT).
    ``base_bytes`` and ``strip_bytes`` are what the cache holds at the end; the peak may include a private copy.
    Each ``_ratio`` compares with other rows of the same repeat: this row over that one.
    """

    policy: str
    schedule: str | None
    chunk: int
    agents: int
    shared: float
    trace_tokens: int
    repeats: int
    total_ttft_s: float
    wall_s: float
    tokens_per_s: float
    decode_tokens_per_s: float
    ttft_cpu_s: float
    decode_cpu_s: float
    neutral_s: float
    neutral_wait_s: float
    tokens_prefilled: int
    catch_up_tokens: int
    flops: int | None  # None: not counted
    catch_up_flops: int | None
    refreshed_kv_entries: int
    neutral_tokens: int
    peak_cache_bytes: int
    base_bytes: int
    strip_bytes: int
    spread: Mapping[str, Spread]
    ttft_ratio: Mapping[str, Spread]
    throughput_ratio: Mapping[str, Spread]
    decode_ratio: Mapping[str, Spread]
    ttft_cpu_ratio: Mapping[str, Spread]
    decode_cpu_ratio: Mapping[str, Spread]
    same_tokens_as_nonshared: float | None


def summarise(chunk: int, trace: Trace, runs: Mapping[RowKey, Sequence[Run]]) -> list[Row]:
    """One row per key, in the order of ``runs``; every key has the same number of repeats."""
    return [_row(key, chunk, trace, runs) for key in runs]


def _row(key: RowKey, chunk: int, trace: Trace, runs: Mapping[RowKey, Sequence[Run]]) -> Row:
    own = runs[key]
    figures: dict[str, Callable[[Run], float]] = {
        "total_ttft_s": lambda run: run.ttft_s,
        "wall_s": lambda run: run.wall_s,
        "tokens_per_s": lambda run: trace.tokens / run.wall_s,
        "decode_tokens_per_s": _decode_speed,
        "ttft_cpu_s": lambda run: run.ttft_cpu_s,
        "decode_cpu_s": lambda run: run.decode_cpu_s,
        "neutral_s": lambda run: run.work.neutral_s,
        "neutral_wait_s": lambda run: run.work.neutral_wait_s,
    }
    spread = {name: spread_of([figure(run) for run in own]) for name, figure in figures.items()}
    references = {other.policy: runs[other] for other in runs if other.policy in REFERENCES}
    work = own[0].work

    def ratios(figure: str) -> dict[str, Spread]:
        return {name: _ratio(figures[figure], own, other) for name, other in references.items()}

    return Row(
        policy=key.policy,
        schedule=key.schedule,
        chunk=chunk,
        agents=len(trace.agents),
        shared=trace.shared,
        trace_tokens=trace.tokens,
        repeats=len(own),
        total_ttft_s=spread["total_ttft_s"].median,
        wall_s=spread["wall_s"].median,
        tokens_per_s=spread["tokens_per_s"].median,
        decode_tokens_per_s=spread["decode_tokens_per_s"].median,
        ttft_cpu_s=spread["ttft_cpu_s"].median,
        decode_cpu_s=spread["decode_cpu_s"].median,
        neutral_s=spread["neutral_s"].median,
        neutral_wait_s=spread["neutral_wait_s"].median,
        tokens_prefilled=work.prefilled + work.catch_up,
        catch_up_tokens=work.catch_up,
        flops=work.flops or None,
        catch_up_flops=work.catch_up_flops if work.flops else None,
        refreshed_kv_entries=work.refreshed_kv_entries,
        neutral_tokens=work.neutral,
        peak_cache_bytes=max(run.cache_bytes.peak for run in own),
        base_bytes=own[-1].cache_bytes.base,
        strip_bytes=own[-1].cache_bytes.strips,
        spread=spread,
        ttft_ratio=ratios("total_ttft_s"),
        throughput_ratio=ratios("tokens_per_s"),
        decode_ratio=ratios("decode_tokens_per_s"),
        ttft_cpu_ratio=ratios("ttft_cpu_s"),
        decode_cpu_ratio=ratios("decode_cpu_s"),
        same_tokens_as_nonshared=_agreement(own, references.get("nonshared")),
    )


def _decode_speed(run: Run) -> float:
    return run.decoded / run.decode_s if run.decode_s else 0.0


def _ratio(figure: Callable[[Run], float], own: Sequence[Run], other: Sequence[Run]) -> Spread:
    """This row over the other one, each repeat with its own neighbour in time."""
    return spread_of([figure(a) / figure(b) for a, b in zip(own, other, strict=True)])


def _agreement(own: Sequence[Run], other: Sequence[Run] | None) -> float | None:
    """Share of a run's output tokens that equal nonshared's at the same place; None without that row."""
    if other is None:
        return None
    ours = [token for turn in own[0].outputs for token in turn]
    theirs = [token for turn in other[0].outputs for token in turn]
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)
