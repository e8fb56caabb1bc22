"""`precache compare`: which policy suits these adapters. Owns options and tables; precache.fidelity measures."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precache.cli.fitting import (
    add_fitting_options,
    check_fitting,
    check_writable,
    fit,
    is_fitting,
)
from precache.cli.options import (
    adapters_from_args,
    add_adapter_option,
    add_policy_options,
    demo_adapters,
    engine_settings,
    quiet_in_pipes,
    refuse_unread,
)
from precache.cli.values import split_names
from precache.errors import ConfigError, PolicyNotAllowedError
from precache.tasks import TASKS, split_of

if TYPE_CHECKING:
    from precache import Engine
    from precache.fidelity.recordings import Recording
    from precache.fidelity.report import Report

SPLITS = ("all", "heldout", "train")
# Those that share without recomputing a part; the others by name.
_DEFAULT_POLICIES = ("fullshared", "baseshared", "baselrshared", "prelrshared", "rebaseshared")
_GROWTH_TOKENS = 64  # the cache grows in small steps, so that its bytes say what a trajectory needs

_EXAMPLE = """examples:
  precache compare smollm2 --adapter plan=adapters/plan --adapter action=adapters/action --trajectories runs.jsonl
  precache compare smollm2 --trajectories role_trajectories --split heldout --layers --html report.html
  precache compare smollm2 --trajectories role_trajectories --split train --calibrate --out corrections.safetensors
  precache compare smollm2 --trajectories role_trajectories --split train --profile droidspeak --out layers.json

--trajectories is a JSONL file of
  {"question_id": "q1", "segments": [{"role": null, "text": "Question: ..."}, {"role": "plan", "text": " I ..."}]}
an --out file of `precache agents`, a file TASK_episodes.jsonl, or a folder that holds one (see --task).
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `compare`."""
    parser = subparsers.add_parser(
        "compare",
        help="how far each sharing policy moves your agents, measured on recorded trajectories",
        description="Replay recorded trajectories under every policy, teacher-forced, and compare the logits with "
        "those of nonshared.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="hub id, local folder, or the alias smollm2")
    add_adapter_option(
        parser,
        "a PEFT LoRA adapter and the role that it plays; repeatable (smollm2 without any: the demo's)",
    )
    add("--trajectories", type=Path, required=True, metavar="PATH", help="recorded trajectories")
    add("--task", choices=sorted(TASKS), default="scienceqa", help="of a folder (%(default)s)")
    add("--split", choices=SPLITS, default="all", help="by question, as in training (%(default)s)")
    add("--limit", type=int, metavar="N", help="the first N trajectories only")
    add(
        "--policies",
        metavar="NAME,NAME",
        help=f"default: {','.join(_DEFAULT_POLICIES)}, where the adapters allow them",
    )
    add(
        "--layers", action="store_true", help="also the errors of every layer, by writer and reader"
    )
    add(
        "--html",
        type=Path,
        metavar="FILE",
        help="write a report with figures; one file, no network",
    )
    add_fitting_options(parser)
    add("--seed", type=int, default=0, help="of the bootstrap (default %(default)s)")
    add("--dtype", help="auto, float32, bfloat16 or float16")
    add("--device", help="auto, cpu, cuda or mps")
    add("--cache-memory", metavar="SIZE", help="hard limit of a policy's cached bytes")
    add_policy_options(parser)
    add("--json", action="store_true", help="one JSON object as the last line")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Replay, compare and print, or write a file for the engine. Options are checked before the model is loaded."""
    _check_options(args)
    policies = _asked_policies(args.policies)
    if not is_fitting(args):
        refuse_unread(args, policies or _DEFAULT_POLICIES)
    adapters = adapters_from_args(args)
    trajectories = _trajectories(args)
    quiet_in_pipes()
    from precache import Engine
    from precache.bench.environment import environment
    from precache.fidelity.recordings import record

    facts = environment()
    with ExitStack() as stack:
        if not adapters and args.model == "smollm2":
            adapters = stack.enter_context(demo_adapters())
        settings = {"growth_tokens": _GROWTH_TOKENS, **engine_settings(args)}
        engine = stack.enter_context(
            Engine.load(args.model, adapters=adapters, policy="nonshared", **settings)
        )
        recordings = [record(trajectory, engine.encode) for trajectory in trajectories]
        if is_fitting(args):
            return fit(args, engine, recordings, partial(_progress, label="fit"))
        report = _compare(args, engine, recordings, policies, facts)
    return _show(args, report)


def _check_options(args: argparse.Namespace) -> None:
    if args.limit is not None and args.limit < 1:
        raise ConfigError("--limit", args.limit, "an integer from 1")
    check_fitting(args)
    if args.html is not None:
        check_writable("--html", args.html)
        if importlib.util.find_spec("matplotlib") is None:
            allowed = 'pip install "precache[compare]"'
            raise ConfigError("--html", "matplotlib is not installed", allowed)


def _compare(
    args: argparse.Namespace,
    engine: Engine,
    recordings: Sequence[Recording],
    policies: Sequence[str],
    facts: dict[str, Any],
) -> Report:
    from precache.fidelity.advice import advise
    from precache.fidelity.layers import layer_picture
    from precache.fidelity.replay import compare
    from precache.fidelity.report import Report
    from precache.fidelity.summary import Summary

    refused = {} if policies else _refused(engine)
    policies = policies or [name for name in _DEFAULT_POLICIES if name not in refused]
    summary = Summary(compare(engine, recordings, policies, progress=_progress), args.seed)
    layers = partial(_progress, label="layers")
    picture = layer_picture(engine, recordings, layers, args.seed) if args.layers else None
    return Report(summary, advise(summary), _facts(args, recordings, facts), refused, picture)


def _show(args: argparse.Namespace, report: Report) -> int:
    from precache.fidelity.report import as_json
    from precache.fidelity.tables import as_text

    print(as_text(report))
    if args.html is not None:
        from precache.fidelity.page import as_html

        args.html.write_text(as_html(report), encoding="utf-8")
        print(f"report: {args.html}")
    if args.json:
        print(json.dumps(as_json(report)))
    return 0


def _facts(
    args: argparse.Namespace, recordings: Sequence[Recording], facts: dict[str, Any]
) -> dict[str, Any]:
    settings = {
        **facts["settings"],
        "model": args.model,
        "adapters": {name: str(path) for name, path in args.adapters} or "demo",
        "trajectories": str(args.trajectories),
        "task": args.task,
        "split": args.split,
        "num_trajectories": len(recordings),
        "num_turns": sum(len(recording.turns) for recording in recordings),
        "seed": args.seed,
    }
    return {**facts, "settings": settings}


# -- what is compared ----------------------------------------------------------------------------


def _known_policies() -> list[str]:
    from precache.engine.policies import POLICIES

    return list(POLICIES)


def _asked_policies(text: str | None) -> list[str]:
    if text is None:
        return []
    names = split_names(text)
    if not names or set(names) - set(_known_policies()):
        raise ConfigError("--policies", text, f"names among {_known_policies()}")
    return names


def _refused(engine: Engine) -> dict[str, str]:
    """The default policies that these adapters do not allow, with the reason."""
    refused = {}
    for name in _DEFAULT_POLICIES:
        try:
            engine.with_policy(name).close()
        except PolicyNotAllowedError as error:
            refused[name] = str(error)
    return refused


def _trajectories(args: argparse.Namespace) -> list[Any]:
    from precache.fidelity.recordings import read_any

    found = [
        trajectory
        for trajectory in read_any(args.trajectories, args.task)
        if args.split in ("all", split_of(trajectory.question_id))
    ][: args.limit]
    if not found:
        raise ConfigError("--split", args.split, f"a split of which {args.trajectories} has some")
    return found


def _progress(recordings: Sequence[Recording], label: str = "replay") -> Iterable[Recording]:
    from tqdm import tqdm

    bar: Iterable[Recording] = tqdm(
        recordings, desc=label, unit="trajectory", disable=not sys.stderr.isatty()
    )
    return bar
