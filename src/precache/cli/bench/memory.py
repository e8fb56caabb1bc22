"""`precache bench memory`: its options and its table."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

from precache.cli.values import given, integers, names

if TYPE_CHECKING:
    from precache.bench.memory import MemoryConfig, MemoryRow

_EXAMPLE = """examples:
  precache bench memory
  precache bench memory --model llama-3.1-8b --agents 3,8 --memory 40GiB --length 100000
  precache bench memory --model path/to/config.json --rank 16 --targets qkvo --json

By count, nothing is loaded or downloaded: bytes of a token in the cache by part, how many tokens and whole trajectories
fit into --memory (room for the cache alone, without the model's weights), and how many agents one trajectory can have.
Built-in models: llama-3.1-8b, ministral-8b, qwen3-8b, smollm2-135m.
"""

_FIELDS = ("rank", "targets", "dtype", "memory", "length")


def add_parser(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the benchmark `memory`."""
    parser = benches.add_parser(
        "memory",
        help="bytes of a cached token by part, and what fits into a given memory, by count",
        description="Count what the cache of a model takes under every policy.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--model",
        metavar="NAME,NAME",
        help="built-in names, local folders or config.json files (default: llama-3.1-8b,ministral-8b,qwen3-8b)",
    )
    add(
        "--policies",
        metavar="NAME,NAME",
        help="default: nonshared,fullshared,prelrshared,rebaseshared",
    )
    add("--agents", metavar="N,N", help="number of agents (default: 3)")
    add("--rank", type=int, help="LoRA rank (default: 8)")
    add("--targets", help="LoRA targets: qv (default), qkvo or all")
    add("--dtype", help="of the cache: bfloat16 (default), float16 or float32")
    add("--memory", metavar="SIZE", help="room for the cache, such as 16GiB (default)")
    add("--length", type=int, metavar="N", help="tokens of one trajectory (default: 65536)")
    add("--json", action="store_true", help="print one JSON object instead of the table")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Count and print."""
    from precache.bench.memory import bench_memory

    config = _config(args)
    rows = bench_memory(config)
    print(json.dumps(_as_json(config, rows)) if args.json else _table(config, rows))
    return 0


def _config(args: argparse.Namespace) -> MemoryConfig:
    from precache.bench.memory import MemoryConfig

    settings = given(args, _FIELDS)
    if args.model is not None:
        settings["models"] = tuple(names("--model", args.model))
    if args.policies is not None:
        settings["policies"] = tuple(names("--policies", args.policies))
    if args.agents is not None:
        settings["agents"] = integers("--agents", args.agents)
    return MemoryConfig(**settings)


def _as_json(config: MemoryConfig, rows: list[MemoryRow]) -> dict[str, Any]:
    return {
        "benchmark": "memory",
        "settings": asdict(config),
        "rows": [asdict(row) for row in rows],
    }


def _table(config: MemoryConfig, rows: list[MemoryRow]) -> str:
    lines = [
        f"{config.dtype}, LoRA rank {config.rank} on {config.targets}; {config.memory} of cache, "
        f"trajectories of {config.length} tokens"
    ]
    for (model, agents), found in groupby(rows, key=lambda row: (row.model, row.agents)):
        lines += [
            f"\n{model}, {agents} agents",
            f"{'policy':<14} {'k and v B/token':>15} {'beside B/token':>14} {'tokens':>10} "
            f"{'trajectories':>12} {'agents at most':>14}",
        ]
        lines += [_line(row) for row in found]
    return "\n".join(lines)


def _line(row: MemoryRow) -> str:
    agents = "any" if row.agents_that_fit is None else str(row.agents_that_fit)
    return (
        f"{row.policy:<14} {row.base_bytes_per_token:>15,} {row.strip_bytes_per_token:>14,} "
        f"{row.tokens_that_fit:>10,} {row.trajectories_that_fit:>12,} {agents:>14}"
    )
