"""`precache bench turns`: its options and its table."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precache.cli.options import adapters_from_args, add_adapter_option, quiet_in_pipes
from precache.cli.values import given, integers, names, numbers
from precache.errors import ConfigError

if TYPE_CHECKING:
    from precache.bench.spread import Spread
    from precache.bench.summary import Row, RowKey
    from precache.bench.turns import TurnsConfig, TurnsReport

_STOCK, _LLAMA_CPP = "stock-peft", "llama-cpp"
_FIELDS = (
    "model", "rounds", "decode", "rank", "targets", "repeats", "seed", "dtype", "device", "cache_memory", "think_s"
)  # fmt: skip
_DEFAULT_POLICIES = "nonshared,fullshared,baseshared,prelrshared,rebaseshared"

_EXAMPLE = """examples:
  precache bench turns
  precache bench turns --chunk 256,2048 --policies prelrshared,fullshared --json
  precache bench turns --policies rebaseshared --schedule lazy-prefill,idle-lazy-prefill --think 2
  precache bench turns --model random-llama --length 66448 --agents 4,8 --repeats 1
  precache bench turns --chunk 1024 --shared 1,0.6,0.2,0
  precache bench turns --chunk 512 --policies nonshared,prelrshared --llama-cpp ~/llama.cpp

The trace is a planner, an actor and a reflector that take turns over one growing trajectory of random tokens; --chunk
is the length of the long prompt of each of its four rounds. Its prompts and output lengths are the same for every row.
"""


def add_parser(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the benchmark `turns`."""
    parser = benches.add_parser(
        "turns",
        help="replay the controlled agent trace under every policy, and under stock transformers + PEFT",
        description="Replay the controlled agent trace under every policy, and under stock transformers + PEFT.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--model",
        help="hub id, local folder, the alias smollm2 (default), or random-llama: a small one for long traces",
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--chunk", metavar="N,N", help="tokens of a long prompt (default: 256,512,1024,2048)"
    )
    length.add_argument(
        "--length", metavar="N,N", help="tokens of the whole trace, whatever the number of agents"
    )
    add("--decode", type=int, metavar="N", help="tokens said after a long prompt (default: 32)")
    add(
        "--shared",
        metavar="X,X",
        help="share of the context, from its start, that all agents have in common (default: 1)",
    )
    add("--policies", default=_DEFAULT_POLICIES, metavar="NAME,NAME", help="default: %(default)s")
    add(
        "--schedule",
        default="lazy-prefill",
        metavar="NAME,NAME",
        help="one row each for the policies that have schedules (default: %(default)s)",
    )
    add("--no-stock", action="store_true", help=f"leave the row {_STOCK} out")
    add(
        "--llama-cpp",
        metavar="FOLDER",
        type=Path,
        help=f"a llama.cpp source tree with a built llama-server: adds the row {_LLAMA_CPP}",
    )
    add("--agents", metavar="N,N", help="number of agents (default: 3)")
    add("--rank", type=int, help="of random adapters (default: 8)")
    add("--targets", help="of random adapters: qv (default), qkvo or all")
    add_adapter_option(
        parser,
        "a PEFT adapter; repeatable, in the order plan, actors, reflect (default: random ones, rank 8 on q and v)",
    )
    add("--rounds", type=int, help="rounds with a long prompt (default: 4)")
    add("--repeats", type=int, help="times that every row is played (default: 3)")
    add("--seed", type=int, help="of the tokens and of random adapters (default: 0)")
    add("--dtype", help="auto, float32, bfloat16 or float16; of every row")
    add("--device", help="auto, cpu, cuda or mps; of every row")
    add(
        "--cache-memory",
        metavar="SIZE",
        help="hard limit of a policy's cached bytes (default: 4GiB)",
    )
    add(
        "--think",
        dest="think_s",
        type=float,
        metavar="S",
        help="seconds between turns (default: 0)",
    )
    add("--json", action="store_true", help="print one JSON object instead of the table")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print. Options are checked before the model is loaded."""
    quiet_in_pipes()
    config = _turns_config(args)
    _check_packages({row.policy for row in config.rows})
    from precache.bench.environment import environment
    from precache.bench.turns import bench_turns

    facts = environment()
    report = bench_turns(config)
    print(json.dumps(_as_json(config, report, facts)) if args.json else _table(report))
    return 0


def _check_packages(rows: Collection[str]) -> None:
    """Raise ConfigError for a package that a row needs and that is not installed."""
    needs = [
        (_STOCK, "peft", 'pip install "precache[train]", or --no-stock without its row'),
        (_LLAMA_CPP, "psutil", "pip install psutil: it reads the server's processor time"),
        (_LLAMA_CPP, "sentencepiece", "pip install sentencepiece: llama.cpp's converters want it"),
    ]
    for row, package, remedy in needs:
        if row in rows and importlib.util.find_spec(package) is None:
            raise ConfigError(package, "not installed", remedy)


def _turns_config(args: argparse.Namespace) -> TurnsConfig:
    from precache.bench.llama_cpp import LlamaCppTree
    from precache.bench.turns import TurnsConfig

    adapters = adapters_from_args(args)
    agents = None if args.agents is None else integers("--agents", args.agents)
    if adapters and agents not in (None, (len(adapters),)):
        raise ConfigError("--agents", args.agents, f"{len(adapters)}, the number of adapters given")
    for name in ("rank", "targets"):
        if adapters and getattr(args, name) is not None:
            raise ConfigError(f"--{name}", getattr(args, name), "without --adapter only")
    settings = given(args, _FIELDS)
    if agents is not None:
        settings["agents"] = agents
    for name, option in (("chunks", args.chunk), ("lengths", args.length)):
        if option is not None:
            settings[name] = integers(f"--{name[:-1]}", option)
    if args.shared is not None:
        settings["shared"] = numbers("--shared", args.shared)
    if args.llama_cpp is not None:
        settings["llama_cpp"] = LlamaCppTree(args.llama_cpp)
    return TurnsConfig(adapters=adapters, rows=_rows(args), **settings)


def _rows(args: argparse.Namespace) -> tuple[RowKey, ...]:
    """Stock and llama.cpp first, then every policy, once for every schedule if it has any."""
    from precache.bench.summary import RowKey
    from precache.engine.policies import POLICIES

    rows = [] if args.no_stock else [RowKey(_STOCK)]
    rows += [] if args.llama_cpp is None else [RowKey(_LLAMA_CPP)]
    schedules = names("--schedule", args.schedule)
    for policy in names("--policies", args.policies):
        known = POLICIES[policy].schedules if policy in POLICIES else ()
        rows += [RowKey(policy, schedule) for schedule in (schedules if known else (None,))]
    return tuple(dict.fromkeys(rows))


def _as_json(config: TurnsConfig, report: TurnsReport, facts: Mapping[str, Any]) -> dict[str, Any]:
    settings = {
        **facts["settings"],
        "model": config.model,
        "dtype": report.dtype,
        "device": report.device,
        "agents": config.crews(),
        "adapters": {name: str(path) for name, path in config.adapters.items()} or "random",
        "rank": None if config.adapters else config.rank,
        "targets": None if config.adapters else config.targets,
        "rounds": config.rounds,
        "decode": config.decode,
        "repeats": config.repeats,
        "seed": config.seed,
        "cache_memory": config.cache_memory,
        "think_s": config.think_s,
        "llama_cpp": config.llama_cpp and config.llama_cpp.version(),
    }
    return {
        "benchmark": "turns",
        **facts,
        "settings": settings,
        "guard": report.guard,  # nats
        "rows": [asdict(row) for row in report.rows],
    }


_HEADER = (
    f"{'policy':<30} {'TTFT s':>8} {'(min-max)':>15} {'/full':>6} {'/non':>6} {'/stock':>6} "
    f"{'tok/s':>7} {'decode/s':>8} {'/stock':>6} {'neutral s':>9} {'prefilled':>9} {'cache MB':>8} "
    f"{'CPU: TTFT s':>11} {'/full':>6} {'/stock':>6} {'decode s':>8} {'/stock':>6}"
)

_LEGEND = (
    "TTFT s: time to first token, summed over the turns, median of the repeats. tok/s: the trajectory's tokens over",
    "all time. decode/s: decode steps only. /full, /non, /stock: this row over fullshared, nonshared and stock-peft in",
    "the same repeat (median). neutral s: passes with adapters off. prefilled: prompt tokens run, reused ones not.",
    "CPU: processor time of the same stretches, which other programs on the machine hardly change.",
)


def _table(report: TurnsReport) -> str:
    lines = [f"{report.dtype} on {report.device}"]
    cases = groupby(report.rows, key=lambda row: (row.agents, row.chunk, row.shared))
    for (agents, chunk, shared), rows in cases:
        first, *others = rows
        common = "" if shared == 1 else f", {shared:.0%} of them common"
        lines += [f"\nchunk {chunk}: {first.trace_tokens} tokens{common}, {agents} agents", _HEADER]
        lines += [_line(row) for row in (first, *others)]
    lines += ["", *_LEGEND]
    return "\n".join(lines)


def _line(row: Row) -> str:
    name = row.policy if row.schedule is None else f"{row.policy} {row.schedule}"
    ttft = row.spread["total_ttft_s"]
    return (
        f"{name:<30} {row.total_ttft_s:>8.2f} {f'{ttft.low:.2f}-{ttft.high:.2f}':>15} "
        f"{_ratio(row.ttft_ratio, 'fullshared')} {_ratio(row.ttft_ratio, 'nonshared')} "
        f"{_ratio(row.ttft_ratio, _STOCK)} {row.tokens_per_s:>7.1f} {row.decode_tokens_per_s:>8.1f} "
        f"{_ratio(row.decode_ratio, _STOCK)} {row.neutral_s + row.neutral_wait_s:>9.2f} "
        f"{row.tokens_prefilled:>9} {row.peak_cache_bytes / 1e6:>8.1f} "
        f"{row.ttft_cpu_s:>11.2f} {_ratio(row.ttft_cpu_ratio, 'fullshared')} "
        f"{_ratio(row.ttft_cpu_ratio, _STOCK)} {row.decode_cpu_s:>8.2f} "
        f"{_ratio(row.decode_cpu_ratio, _STOCK)}"
    )


def _ratio(ratios: Mapping[str, Spread], name: str) -> str:
    return f"{ratios[name].median:>6.2f}" if name in ratios else f"{'-':>6}"
