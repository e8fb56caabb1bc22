"""What the plays of one row at one rate are reported as."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from precache.bench.serving.client import Turn
from precache.bench.serving.load import Play
from precache.bench.spread import Spread, spread_of
from precache.bench.trace import Trace
from precache.vllm_plugin.launch import BLOCK_SIZE

STOCK = "stock-vllm"


@dataclass(frozen=True)
class ServingRow:
    """One policy at one rate, over all repeats. Ratios are to stock vLLM in the same repeat at the same rate.

    ``tokens_per_s`` is the throughput of a request as the paper counts it: tokens of a trajectory over its latency,
    median. ``peak_kv_blocks`` are blocks in use at once, as vLLM reports them; ``kv_blocks_filled`` is what a cache has
    to hold to keep everything it could reuse: blocks of the tokens that were run, per trajectory.
    """

    policy: str
    qps: float
    requests: int
    ttft_p50_s: float
    ttft_p90_s: float
    trajectory_latency_p50_s: float
    trajectory_latency_p90_s: float
    tokens_per_s: float
    decode_ms_per_token: float
    prompt_tokens: int
    cached_tokens: int
    peak_kv_blocks: int
    kv_blocks_filled: float
    throughput_ratio: Spread | None = None  # over stock
    ttft_ratio: Spread | None = None
    decode_ratio: Spread | None = None
    blocks_ratio: Spread | None = None
    repeats: int = 1


@dataclass
class _Figures:
    """One play's figures."""

    ttft: list[float] = field(default_factory=list)
    latency: list[float] = field(default_factory=list)
    throughput: float = 0.0
    decode_ms: float = 0.0
    filled: float = 0.0


def summarise(plays: Mapping[tuple[str, float], Sequence[Play]], trace: Trace) -> list[ServingRow]:
    """One row per policy and rate."""
    figures = {
        key: [_figures(played, trace.tokens) for played in found] for key, found in plays.items()
    }
    return [_row(*key, found, figures, trace) for key, found in plays.items()]


def _row(
    policy: str,
    qps: float,
    plays: Sequence[Play],
    figures: Mapping[tuple[str, float], Sequence[_Figures]],
    trace: Trace,
) -> ServingRow:
    own, stock = figures[policy, qps], figures.get((STOCK, qps))
    turns = [turn for played in plays for turn in _turns(played)]
    ttft = [value for one in own for value in one.ttft]
    latency = [value for one in own for value in one.latency]

    def ratio(name: str) -> Spread | None:
        if stock is None:
            return None
        pairs = zip(own, stock, strict=True)
        return spread_of([_value(one, name) / _value(other, name) for one, other in pairs])

    return ServingRow(
        policy=policy,
        qps=qps,
        requests=len(turns),
        ttft_p50_s=median(ttft),
        ttft_p90_s=_percentile(ttft, 0.9),
        trajectory_latency_p50_s=median(latency),
        trajectory_latency_p90_s=_percentile(latency, 0.9),
        tokens_per_s=trace.tokens / median(latency),
        decode_ms_per_token=median([one.decode_ms for one in own]),
        prompt_tokens=sum(turn.prompt_tokens for turn in turns),
        cached_tokens=sum(turn.cached_tokens for turn in turns),
        peak_kv_blocks=max(played.peak_blocks for played in plays),
        kv_blocks_filled=median([one.filled for one in own]),
        throughput_ratio=ratio("throughput"),
        ttft_ratio=ratio("ttft"),
        decode_ratio=ratio("decode_ms"),
        blocks_ratio=ratio("filled"),
        repeats=len(plays),
    )


def _value(figures: _Figures, name: str) -> float:
    value = getattr(figures, name)
    return float(median(value) if isinstance(value, list) else value)


def _figures(played: Play, trace_tokens: int) -> _Figures:
    turns = list(_turns(played))
    latency = [sum(turn.latency_s for turn in found) for found in played.trajectories]
    steps = [
        (turn.latency_s - turn.ttft_s) / (len(turn.token_ids) - 1)
        for turn in turns
        if len(turn.token_ids) > 1
    ]
    run = sum(turn.prompt_tokens - turn.cached_tokens + len(turn.token_ids) - 1 for turn in turns)
    return _Figures(
        ttft=[turn.ttft_s for turn in turns],
        latency=latency,
        throughput=trace_tokens / median(latency),
        decode_ms=1000 * median(steps),
        filled=run / BLOCK_SIZE / len(played.trajectories),
    )


def _turns(played: Play) -> Iterator[Turn]:
    for found in played.trajectories:
        yield from found


def _percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
