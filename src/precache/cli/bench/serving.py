"""`precache bench serving`: its options and its table."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from precache.cli.options import adapters_from_args, add_adapter_option, quiet_in_pipes
from precache.cli.values import given, names, numbers
from precache.errors import ConfigError

if TYPE_CHECKING:
    from precache.bench.serving import ServingConfig, ServingRow
    from precache.bench.spread import Spread

_STOCK = "stock-vllm"
_EXAMPLE = """examples:
  precache bench serving --engine vllm --policies nonshared,prelrshared,rebaseshared --qps 0.25,0.5,1,2,4 --chunk 512
  precache bench serving --qps 0.5 --chunk 256 --trajectories 2 --json

Starts vLLM's own server for every row, one after the other. The row stock-vllm is vLLM without the plugin and with the
same flags; nonshared is the plugin's replacement of the CPU LoRA path alone.
"""
_FIELDS = (
    "model",
    "chunk",
    "rounds",
    "agents",
    "trajectories",
    "repeats",
    "seed",
    "dtype",
    "cache_memory",
)


def add_parser(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the benchmark `serving`."""
    parser = benches.add_parser(
        "serving",
        help="the controlled trace at a request rate, against real server processes",
        description="Replay the controlled trace at a request rate against a server per policy.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--engine", choices=("vllm",), default="vllm", help="what serves (default: vllm)")
    add("--model", help="hub id, local folder, or the alias smollm2 (default)")
    add(
        "--policies",
        default="nonshared,prelrshared,rebaseshared",
        metavar="NAME,NAME",
        help="default: %(default)s",
    )
    add("--no-stock", action="store_true", help=f"leave the row {_STOCK} out")
    add("--qps", metavar="X,X", help="requests per second offered (default: 0.25,0.5,1,2,4)")
    add("--chunk", type=int, metavar="N", help="tokens of a long prompt (default: 512)")
    add("--rounds", type=int, help="rounds with a long prompt (default: 4)")
    add("--agents", type=int, help="number of agents (default: 3)")
    add("--trajectories", type=int, metavar="N", help="started per rate (default: 4)")
    add("--repeats", type=int, help="times that all rows are played (default: 1)")
    add("--seed", type=int, help="of tokens, arrivals and random adapters (default: 0)")
    add("--dtype", help="of the model and the cache, as vLLM's --dtype (default: vLLM's choice)")
    add("--cache-memory", metavar="SIZE", help="KV cache of each server (default: 2GiB)")
    add_adapter_option(
        parser,
        "a PEFT adapter; repeatable (default: random ones, rank 8 on q and v)",
    )
    add("--flags", default="", metavar='"--a B"', help="further flags of vLLM's server, every row")
    add("--json", action="store_true", help="print one JSON object instead of the table")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print. Options are checked before a server is started."""
    quiet_in_pipes()
    config = _config(args)
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "--engine", "vllm, which is not installed", "an environment as in docs/vllm.md"
        )
    from precache.bench.environment import environment
    from precache.bench.serving import bench_serving

    facts = environment()
    rows = bench_serving(config)
    print(json.dumps(_as_json(config, rows, facts)) if args.json else _table(rows))
    return 0


def _config(args: argparse.Namespace) -> ServingConfig:
    from precache.bench.serving import ServingConfig

    settings = given(args, _FIELDS)
    if args.qps is not None:
        settings["qps"] = numbers("--qps", args.qps)
    rows = names("--policies", args.policies)
    settings["rows"] = tuple(rows if args.no_stock else dict.fromkeys([_STOCK, *rows]))
    return ServingConfig(
        adapters=adapters_from_args(args), flags=tuple(args.flags.split()), **settings
    )


def _as_json(
    config: ServingConfig, rows: list[ServingRow], facts: Mapping[str, Any]
) -> dict[str, Any]:
    adapters = {name: str(path) for name, path in config.adapters.items()} or "random"
    settings = {**facts["settings"], **asdict(config), "adapters": adapters}
    return {
        "benchmark": "serving",
        **facts,
        "settings": settings,
        "rows": [asdict(row) for row in rows],
    }


_HEADER = (
    f"{'policy':<14} {'qps':>5} {'TTFT p50':>9} {'p90 s':>7} {'latency p50':>11} {'p90 s':>7} {'tok/s':>7} "
    f"{'/stock':>7} {'decode ms':>9} {'/stock':>7} {'cached':>7} {'peak blocks':>11} {'filled':>7} {'/stock':>7}"
)
_LEGEND = (
    "latency: of a trajectory, the sum of its turns. tok/s: a trajectory's tokens over its latency. cached: share of",
    "the prompt tokens found in the cache. peak blocks: in use at once. filled: KV blocks of what was run, per",
    "trajectory. /stock: over stock-vllm in the same repeat (median).",
)


def _table(rows: list[ServingRow]) -> str:
    lines = [_HEADER]
    for row in rows:
        cached = row.cached_tokens / row.prompt_tokens
        lines.append(
            f"{row.policy:<14} {row.qps:>5g} {row.ttft_p50_s:>9.2f} {row.ttft_p90_s:>7.2f} "
            f"{row.trajectory_latency_p50_s:>11.1f} {row.trajectory_latency_p90_s:>7.1f} "
            f"{row.tokens_per_s:>7.1f} {_ratio(row.throughput_ratio)} {row.decode_ms_per_token:>9.1f} "
            f"{_ratio(row.decode_ratio)} {cached:>6.0%} {row.peak_kv_blocks:>11} "
            f"{row.kv_blocks_filled:>7.0f} {_ratio(row.blocks_ratio)}"
        )
    return "\n".join([*lines, "", *_LEGEND])


def _ratio(spread: Spread | None) -> str:
    return f"{'-':>7}" if spread is None else f"{spread.median:>7.2f}"
