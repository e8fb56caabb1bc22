"""`precache compare`: which policy suits these adapters. Owns options and tables; precache.fidelity measures."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from precache.cli.options import (
    adapter_pair,
    adapters_from_args,
    demo_adapters,
    engine_settings,
    quiet_in_pipes,
)
from precache.errors import ConfigError, PolicyNotAllowedError
from precache.tasks import TASKS, split_of

if TYPE_CHECKING:
    from precache import Engine
    from precache.fidelity.advice import Advice
    from precache.fidelity.layers import LayerPicture
    from precache.fidelity.recordings import Recording
    from precache.fidelity.summary import CostRow, FidelityRow, Summary

SPLITS = ("all", "heldout", "train")
_GROWTH_TOKENS = 64  # the cache grows in small steps, so that its bytes say what a trajectory needs

_EXAMPLE = """examples:
  precache compare smollm2 --adapter plan=adapters/plan --adapter action=adapters/action --trajectories runs.jsonl
  precache compare smollm2 --trajectories role_trajectories --split heldout --json

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
    add(
        "--adapter",
        dest="adapters",
        type=adapter_pair,
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="a PEFT LoRA adapter and the role that it plays; repeatable (smollm2 without any: the demo's)",
    )
    add("--trajectories", type=Path, required=True, metavar="PATH", help="recorded trajectories")
    add("--task", choices=sorted(TASKS), default="scienceqa", help="of a folder (%(default)s)")
    add("--split", choices=SPLITS, default="all", help="by question, as in training (%(default)s)")
    add("--limit", type=int, metavar="N", help="the first N trajectories only")
    add("--policies", metavar="NAME,NAME", help="default: all that these adapters allow")
    add(
        "--layers", action="store_true", help="also the errors of every layer, by writer and reader"
    )
    add(
        "--html",
        type=Path,
        metavar="FILE",
        help="write a report with figures; one file, no network",
    )
    add("--seed", type=int, default=0, help="of the bootstrap (default %(default)s)")
    add("--dtype", help="auto, float32, bfloat16 or float16")
    add("--device", help="auto, cpu or cuda")
    add("--cache-memory", metavar="SIZE", help="hard limit of a policy's cached bytes")
    add("--json", action="store_true", help="one JSON object as the last line")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Replay, compare and print. Options are checked before the model is loaded."""
    if args.limit is not None and args.limit < 1:
        raise ConfigError("--limit", args.limit, "an integer from 1")
    _check_report(args.html)
    policies = _asked_policies(args.policies)
    adapters = adapters_from_args(args)
    trajectories = _trajectories(args)
    quiet_in_pipes()
    from precache import Engine
    from precache.bench.environment import environment
    from precache.fidelity.advice import advise
    from precache.fidelity.layers import layer_picture
    from precache.fidelity.recordings import record
    from precache.fidelity.replay import compare
    from precache.fidelity.summary import Summary

    facts = environment()
    with ExitStack() as stack:
        if not adapters and args.model == "smollm2":
            adapters = stack.enter_context(demo_adapters())
        settings = {"growth_tokens": _GROWTH_TOKENS, **engine_settings(args)}
        engine = stack.enter_context(
            Engine.load(args.model, adapters=adapters, policy="nonshared", **settings)
        )
        refused = {} if policies else _refused(engine)
        policies = policies or [name for name in _known_policies() if name not in refused]
        recordings = [record(trajectory, engine.encode) for trajectory in trajectories]
        comparison = compare(engine, recordings, policies, progress=_progress)
        picture = (
            layer_picture(engine, recordings, partial(_progress, label="layers"), args.seed)
            if args.layers
            else None
        )
    summary = Summary(comparison, args.seed)
    found = _Found(summary, advise(summary), picture, refused, _facts(args, recordings, facts))
    print(_text(found))
    if args.html is not None:
        _write_report(args.html, found)
    if args.json:
        print(json.dumps(_as_json(found)))
    return 0


class _Found(NamedTuple):
    """Everything that is shown."""

    summary: Summary
    advice: Sequence[Advice]
    picture: LayerPicture | None
    refused: dict[str, str]
    facts: dict[str, Any]


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


def _check_report(path: Path | None) -> None:
    """Refuse a report that could not be written at the end of a long run."""
    if path is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "--html", "matplotlib is not installed", 'pip install "precache[compare]"'
        )
    if not path.absolute().parent.is_dir() or path.is_dir():
        raise ConfigError("--html", str(path), "a file in a folder that exists")


def _write_report(path: Path, found: _Found) -> None:
    from precache.fidelity.report import Report

    report = Report(found.summary, found.advice, found.facts, found.refused, found.picture)
    path.write_text(report.html(), encoding="utf-8")
    print(f"report: {path}")


# -- what is compared ----------------------------------------------------------------------------


def _known_policies() -> list[str]:
    from precache.engine.policies import POLICIES

    return list(POLICIES)


def _asked_policies(text: str | None) -> list[str]:
    if text is None:
        return []
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or set(names) - set(_known_policies()):
        raise ConfigError("--policies", text, f"names among {_known_policies()}")
    return names


def _refused(engine: Engine) -> dict[str, str]:
    """The policies that these adapters do not allow, with the reason."""
    refused = {}
    for name in _known_policies():
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


# -- what is shown -------------------------------------------------------------------------------


def _text(found: _Found) -> str:
    summary = found.summary
    recordings = summary.comparison.recordings
    lines = [
        f"{len(recordings)} trajectories, {sum(len(r.turns) for r in recordings)} turns. Brackets are 95 % bootstrap "
        "intervals over trajectories.",
        "KL(nonshared || policy) and the NLL of the recorded text in nats per token said, by the role that reads.",
        "",
        f"{'policy':<13} {'role':<10} {'tokens':>6}  {'KL':<24} {'top-1':<22} {'NLL':<24} {'max |dlogit|'}",
        *(_fidelity_line(row) for row in summary.rows()),
        "",
        f"{'policy':<13} {'tokens run':>10} {'recomputed':>10} {'GFLOPs':>8} {'/nonshared':>10} {'cache MB':>8} "
        f"{'/nonshared':>10}",
        *(_cost_line(row) for row in summary.costs()),
        "",
        *(_layer_lines(found.picture, summary) if found.picture else ()),
        *(item.sentence for item in found.advice),
        *(f"left out: {reason}" for reason in found.refused.values()),
    ]
    return "\n".join(lines)


def _layer_lines(picture: LayerPicture, summary: Summary) -> Iterator[str]:
    from precache.fidelity.prediction import predict

    yield "Error from the writer's cache over that from the neutral one (above 1: neutral is closer), all layers:"
    yield (
        f"{'writer':<10} {'reader':<10} {'tokens':>6}  {'hidden':<21} {'k':<21} {'v_base':<21} "
        "rho >= 2 cos  right for k, v_base"
    )
    for pair in picture.pairs():
        yield (
            f"{pair.writer:<10} {pair.reader:<10} {pair.tokens:>6}  {pair.hidden_ratio.rounded(3):<21} "
            f"{pair.k_ratio.rounded(3):<21} {pair.v_base_ratio.rounded(3):<21} "
            f"{pair.expected:>5} of {pair.layers:<2}  {pair.k_right:>6} and {pair.v_base_right} of {pair.layers}"
        )
    for item in predict(picture, summary):
        yield (
            f"{item.reader}: the condition expects {item.expected} ({item.neutral_share:.0%} for neutral), measured "
            f"{item.measured or 'undecided'} (KL prelrshared - rebaseshared {item.difference})"
        )
    yield ""


def _fidelity_line(row: FidelityRow) -> str:
    from precache.fidelity.intervals import Interval

    kl = Interval(row.kl, row.kl_low, row.kl_high)
    nll = Interval(row.nll, row.nll_low, row.nll_high)
    top1 = Interval(row.top1_agreement, row.top1_agreement_low, row.top1_agreement_high)
    largest = Interval(row.max_dlogit, row.max_dlogit_low, row.max_dlogit_high)
    return (
        f"{row.policy:<13} {row.role:<10} {row.tokens:>6}  {kl!s:<24} {top1.rounded(3):<22} "
        f"{nll.rounded(3):<24} {largest.rounded(2)}"
    )


def _cost_line(row: CostRow) -> str:
    return (
        f"{row.policy:<13} {row.tokens_run:>10.0f} {row.tokens_recomputed:>10.0f} {row.flops / 1e9:>8.0f} "
        f"{row.flops_ratio:>10.3f} {row.cache_bytes / 1e6:>8.2f} {row.cache_bytes_ratio:>10.3f}"
    )


def _as_json(found: _Found) -> dict[str, Any]:
    summary, picture = found.summary, found.picture
    values = {
        "comparison": "fidelity",
        **found.facts,
        "rows": [asdict(row) for row in summary.rows()],
        "costs": [asdict(row) for row in summary.costs()],
        "recommendations": [_plain(asdict(item)) for item in found.advice],
        "refused": found.refused,
    }
    if picture is None:
        return values
    from precache.fidelity.prediction import predict

    layers = {
        "rows": [asdict(row) for row in picture.rows()],
        "pairs": [_plain(asdict(row)) for row in picture.pairs()],
        "predictions": [_plain(asdict(item)) for item in predict(picture, summary)],
    }
    return {**values, "layers": layers}


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Intervals as objects, not lists."""
    return {
        name: value._asdict() if hasattr(value, "_asdict") else value
        for name, value in values.items()
    }
