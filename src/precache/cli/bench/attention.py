"""`precache bench attention`: its options and its table."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

from precache.cli.values import given, integers, names

if TYPE_CHECKING:
    from precache.bench.attention.measure import AttentionConfig, AttentionReport, AttentionRow

_EXAMPLE = """examples:
  precache bench attention
  precache bench attention --heads 32/8/128 --contexts 8192 --ranks 8,16,64 --json
  precache bench attention --device cuda --backends triton,cpu --dtypes bfloat16 --longest-prefill 65536

Attention of one layer over the shared cache, for one sequence: a decode step and a prefill of --prefill queries, beside
torch's attention (sdpa) on the adapter's own values, which a cache without sharing holds (sdpa+expand: which are made
from the shared cache in each call), and beside a large matrix product and a large copy on this machine.
"""

_FIELDS = ("prefill", "longest_prefill", "device", "repeats", "seed")


def add_parser(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the benchmark `attention`."""
    parser = benches.add_parser(
        "attention",
        help="the attention backends next to torch's, and to what this machine can do",
        description="Time attention over the shared cache on random tensors.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--heads", metavar="H/KV/D,H/KV/D", help="default: 9/3/64,32/8/128")
    add("--contexts", metavar="N,N", help="cached tokens (default: 2048,8192,32768,65536)")
    add("--ranks", metavar="N,N", help="LoRA ranks (default: 8,64)")
    add("--prefill", type=int, metavar="N", help="queries of a prefill, 0: none (default: 512)")
    add(
        "--longest-prefill",
        type=int,
        metavar="N",
        help="no prefill at longer contexts (default: 8192)",
    )
    add("--dtypes", metavar="NAME,NAME", help="default: float32,bfloat16")
    add("--backends", metavar="NAME,NAME", help="of lora_attention (default: auto,cpu)")
    add("--device", help="cpu (default) or cuda")
    add("--repeats", type=int, help="times that every method is timed (default: 5)")
    add(
        "--emulated",
        action="store_true",
        help="prefill also in dtypes that the processor emulates: minutes a call",
    )
    add("--seed", type=int, help="of the tensors (default: 0)")
    add("--json", action="store_true", help="print one JSON object instead of the table")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    from precache.bench.attention.measure import bench_attention
    from precache.bench.environment import environment

    config, facts = _config(args), environment()
    report = bench_attention(config)
    print(json.dumps(_as_json(config, report, facts)) if args.json else _table(report))
    return 0


def _config(args: argparse.Namespace) -> AttentionConfig:
    from precache.bench.attention.measure import AttentionConfig
    from precache.bench.attention.points import parse_heads

    settings = given(args, _FIELDS)
    if args.heads is not None:
        settings["heads"] = tuple(parse_heads(text) for text in names("--heads", args.heads))
    for name in ("contexts", "ranks"):
        if getattr(args, name) is not None:
            settings[name] = integers(f"--{name}", getattr(args, name))
    for name in ("dtypes", "backends"):
        if getattr(args, name) is not None:
            settings[name] = tuple(names(f"--{name}", getattr(args, name)))
    return AttentionConfig(emulated=args.emulated, **settings)


def _as_json(
    config: AttentionConfig, report: AttentionReport, facts: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "benchmark": "attention",
        **facts,
        "settings": {**facts["settings"], **asdict(config)},
        "ceilings": {name: asdict(found) for name, found in report.ceilings.items()},
        "left_out": list(report.left_out),
        "rows": [asdict(row) for row in report.rows],
    }


_LEGEND = (
    "ms: one call, median of the repeats. /sdpa: time of torch's attention on ready values over this one's, in the",
    "same repeat: on the wall (smallest-largest), and of the processor. GFLOP/s, GB/s: what the call needs, and the",
    "share of the large product and of the large copy. error: relative to float32, root mean square.",
)


def _table(report: AttentionReport) -> str:
    lines = [
        f"{name}: product {found.operations_per_s / 1e9:.1f} GFLOP/s, copy {found.bytes_per_s / 1e9:.1f} GB/s"
        for name, found in report.ceilings.items()
    ]
    for (kind, heads, dtype), rows in groupby(
        report.rows, key=lambda row: (row.kind, row.heads, row.dtype)
    ):
        lines += [
            f"\n{kind} {heads} {dtype}",
            f"{'context':>7} {'rank':>4} {'method':<12} {'ms':>9} {'/sdpa':>6} {'(min-max)':>13} {'cpu':>6} "
            f"{'GFLOP/s':>8} {'%':>4} {'GB/s':>6} {'%':>4} {'error':>8}",
        ]
        lines += [_line(row) for row in rows]
    lines += ["", *_LEGEND]
    lines += [f"left out: {what}" for what in report.left_out]
    return "\n".join(lines)


def _line(row: AttentionRow) -> str:
    ratio, cpu = row.speedup.get("sdpa"), row.cpu_speedup.get("sdpa")
    compared = f"{'-':>6} {'':>13} {'-':>6}"
    if ratio is not None and cpu is not None:
        span = f"{ratio.low:.2f}-{ratio.high:.2f}"
        compared = f"{ratio.median:>6.2f} {span:>13} {cpu.median:>6.2f}"
    return (
        f"{row.context:>7} {row.rank:>4} {row.method:<12} {row.wall_s.median * 1e3:>9.2f} {compared} "
        f"{row.operations_per_s / 1e9:>8.1f} {row.of_gemm:>4.0%} {row.bytes_per_s / 1e9:>6.1f} {row.of_copy:>4.0%} "
        f"{row.error:>8.1e}"
    )
