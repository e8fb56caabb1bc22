"""Measures every method at every point of the grid, one after the other within each repeat."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from tqdm import tqdm

from precache.bench.attention.ceilings import Ceilings, measure_ceilings
from precache.bench.attention.methods import SDPA, SDPA_EXPAND, Method, make_method
from precache.bench.attention.points import Heads, Point, Problem, make_problem
from precache.bench.attention.timing import Sample, seconds_per_call
from precache.bench.spread import Spread, spread_of
from precache.engine.model import NAMED_DTYPES
from precache.errors import ConfigError
from precache.ops import AUTO, available_backends, choose_backend, reference
from precache.ops.contract import AttentionInputs, ValueStrip
from precache.ops.numerics import product_dtype

_CHECKED_QUERIES = 16  # the last ones; the reference holds all their scores
_SHORTEST_SAMPLE_S = 0.02


@dataclass(frozen=True)
class AttentionConfig:
    """The grid. ``prefill`` is the number of queries of a prefill, 0 for none.

    A prefill is measured at the contexts up to ``longest_prefill`` and, unless ``emulated`` says so, only in dtypes
    whose products the processor does not emulate (a prefill of SDPA then takes minutes).
    """

    heads: tuple[Heads, ...] = (Heads(9, 3, 64), Heads(32, 8, 128))
    contexts: tuple[int, ...] = (2048, 8192, 32768, 65536)
    ranks: tuple[int, ...] = (8, 64)
    prefill: int = 512
    longest_prefill: int = 8192
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    backends: tuple[str, ...] = (AUTO, "cpu")
    device: str = "cpu"
    repeats: int = 5
    emulated: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for option, got in (
            ("--contexts", self.contexts),
            ("--ranks", self.ranks),
            ("--repeats", (self.repeats,)),
        ):
            if not got or min(got) < 1:
                raise ConfigError(option, list(got), "integers of at least 1")
        if self.prefill < 0 or self.prefill == 1 or self.prefill > min(self.contexts):
            allowed = f"0, or 2 up to the shortest context, {min(self.contexts)}"
            raise ConfigError("--prefill", self.prefill, allowed)
        if unknown := [name for name in self.dtypes if name not in NAMED_DTYPES]:
            raise ConfigError("--dtypes", unknown, f"names among {list(NAMED_DTYPES)}")
        known = [AUTO, *available_backends()]
        if unknown := [name for name in self.backends if name not in known]:
            raise ConfigError("--backends", unknown, f"names among {known}")

    def points(self) -> Iterator[Point]:
        """Decoding first, then prefill."""
        for q_len in (1, self.prefill) if self.prefill else (1,):
            for heads in self.heads:
                for name in self.dtypes:
                    for context in self.contexts:
                        for rank in self.ranks:
                            yield Point(heads, context, q_len, rank, NAMED_DTYPES[name])


@dataclass(frozen=True)
class AttentionRow:
    """One method at one point. Seconds are of one call. ``speedup`` is SDPA's time over this one's, in the same repeat.

    ``operations_per_s`` and ``bytes_per_s`` count the work that the call needs (`Point`), whatever the method does, and
    ``of_gemm`` and ``of_copy`` are their shares of the ceilings. ``error`` is the root mean square of the difference to
    the float32 reference over that of the reference.
    """

    kind: str
    heads: str
    context: int
    q_len: int
    rank: int
    dtype: str
    method: str
    repeats: int
    wall_s: Spread
    cpu_s: Spread
    operations_per_s: float
    bytes_per_s: float
    of_gemm: float
    of_copy: float
    error: float
    speedup: Mapping[str, Spread]
    cpu_speedup: Mapping[str, Spread]


@dataclass(frozen=True)
class AttentionReport:
    """The rows, the ceilings by dtype, and what of the grid was left out, in words."""

    rows: tuple[AttentionRow, ...]
    ceilings: Mapping[str, Ceilings]
    left_out: tuple[str, ...]


@torch.inference_mode()
def bench_attention(config: AttentionConfig) -> AttentionReport:
    """Measure. Raises BackendUnavailableError for a backend that cannot run on the device."""
    device = torch.device(config.device)
    ceilings = {name: measure_ceilings(NAMED_DTYPES[name], device) for name in config.dtypes}
    kept, left_out = _kept(config, device)
    rows: list[AttentionRow] = []
    for point in tqdm(kept, desc="attention", disable=None, leave=False):
        problem = make_problem(point, device, config.seed)
        rows += _measure(config, point, problem, ceilings[_name(point.dtype)])
    return AttentionReport(tuple(rows), ceilings, tuple(left_out))


def _kept(config: AttentionConfig, device: torch.device) -> tuple[list[Point], list[str]]:
    kept, left_out = [], []
    for point in config.points():
        emulated = product_dtype(torch.empty(0, dtype=point.dtype, device=device)) != point.dtype
        if point.kind == "prefill" and point.context > config.longest_prefill:
            left_out.append(f"prefill at contexts beyond {config.longest_prefill}")
        elif point.kind == "prefill" and emulated and not config.emulated:
            left_out.append(f"prefill in {_name(point.dtype)}, which this processor emulates")
        else:
            kept.append(point)
    return kept, list(dict.fromkeys(left_out))


def _measure(
    config: AttentionConfig, point: Point, problem: Problem, ceilings: Ceilings
) -> list[AttentionRow]:
    device = problem.inputs.q.device
    chosen = [choose_backend(name, device, point.dtype) for name in config.backends]
    methods = {name: make_method(name, problem) for name in (*chosen, SDPA, SDPA_EXPAND)}
    exact = _exact(problem)
    errors = {name: _error(method, exact) for name, method in methods.items()}  # warms up, too
    calls = {}
    for name, method in methods.items():
        once = seconds_per_call(method, 1, device).wall_s
        calls[name] = max(1, math.ceil(_SHORTEST_SAMPLE_S / once))
    samples: dict[str, list[Sample]] = {name: [] for name in methods}
    for _ in range(config.repeats):
        for name, method in methods.items():
            samples[name].append(seconds_per_call(method, calls[name], device))
    return [_row(point, name, samples, errors[name], ceilings) for name in methods]


def _exact(problem: Problem) -> torch.Tensor:
    """The last queries by the definition, in float32."""
    inputs, count = problem.inputs, min(_CHECKED_QUERIES, problem.inputs.q.shape[1])
    strip = inputs.v_lora
    assert strip is not None
    q, k, v_base, z, b = (
        tensor.float()
        for tensor in (inputs.q[:, -count:], inputs.k, inputs.v_base, strip.z, strip.b)
    )
    position = inputs.k.shape[1] - count
    return reference.attend(
        AttentionInputs(q, k, v_base, inputs.scale, position, 0, ValueStrip(z, b), None, None, None)
    ).out


def _error(method: Method, exact: torch.Tensor) -> float:
    difference = method()[:, -exact.shape[1] :].float() - exact
    return float(difference.square().mean().sqrt() / exact.square().mean().sqrt())


def _row(
    point: Point,
    name: str,
    samples: Mapping[str, Sequence[Sample]],
    error: float,
    ceilings: Ceilings,
) -> AttentionRow:
    wall = spread_of([sample.wall_s for sample in samples[name]])
    operations, read = point.operations / wall.median, point.bytes_read / wall.median
    others = [other for other in (SDPA, SDPA_EXPAND) if other != name]
    return AttentionRow(
        kind=point.kind,
        heads=str(point.heads),
        context=point.context,
        q_len=point.q_len,
        rank=point.rank,
        dtype=_name(point.dtype),
        method=name,
        repeats=len(samples[name]),
        wall_s=wall,
        cpu_s=spread_of([sample.cpu_s for sample in samples[name]]),
        operations_per_s=operations,
        bytes_per_s=read,
        of_gemm=operations / ceilings.operations_per_s,
        of_copy=read / ceilings.bytes_per_s,
        error=error,
        speedup={other: _ratio(samples, other, name, "wall_s") for other in others},
        cpu_speedup={other: _ratio(samples, other, name, "cpu_s") for other in others},
    )


def _ratio(samples: Mapping[str, Sequence[Sample]], other: str, name: str, clock: str) -> Spread:
    pairs = zip(samples[other], samples[name], strict=True)
    return spread_of([getattr(theirs, clock) / getattr(ours, clock) for theirs, ours in pairs])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
