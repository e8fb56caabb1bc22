"""`precache train`: role adapters from trajectories. Owns the options, not the training."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precache.cli.values import flag
from precache.tasks import ROLES, TASKS
from precache.training.errors import MissingPackageError
from precache.training.recipe import DEVICES, DTYPES, TARGETS, Recipe, TrainConfig

if TYPE_CHECKING:
    from precache.training.run import TrainReport

_EXAMPLE = """example:
  precache train --task scienceqa --data ../shared/data/role_trajectories --out adapters
  precache train --data my_trajectories.jsonl --role critic --out adapters --steps 200

--data is a folder with TASK_episodes.jsonl, or a JSONL file of your own trajectories:
  {"question_id": "q1", "segments": [{"role": null, "text": "Question: ...\\nThought 1:"},
                                     {"role": "plan", "text": " I should search.\\n"}]}
Each role is trained on what it wrote only. About 15 % of the questions are held out, by hash.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `train`; its defaults are the dataclasses' own."""
    parser = subparsers.add_parser(
        "train",
        help="train role adapters (PEFT LoRA) from trajectories",
        description="Train one LoRA adapter per role on recorded trajectories.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_run_options(parser)
    _add_recipe_options(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Train as `args` say. Every option is checked before anything is loaded or written."""
    config = config_from_args(args)
    if importlib.util.find_spec("peft") is None:
        raise MissingPackageError(
            "precache train needs peft, which is not installed: pip install 'precache[train]'"
        )
    from precache.training.run import train

    _silence_loading_bars_in_a_pipe()
    report = train(config)
    if args.json:
        print(json.dumps(report.as_dict()))
    else:
        print(format_report(report, config))
    return 0


def config_from_args(args: argparse.Namespace) -> TrainConfig:
    """Build the checked configuration; raises `ConfigError` naming the option, got, allowed."""
    recipe = Recipe(**{name: getattr(args, name) for name in _RECIPE_OPTIONS})
    return TrainConfig(
        data=args.data,
        out=args.out,
        task=args.task,
        roles=tuple(args.role or ROLES),
        model=args.model,
        recipe=recipe,
        heldout_episodes=args.heldout_episodes,
        save_every=args.save_every,
        resume=args.resume,
        device=args.device,
    )


def _silence_loading_bars_in_a_pipe() -> None:
    """transformers shows its loading bar everywhere, ours shows on a terminal only."""
    if not sys.stderr.isatty():
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def format_report(report: TrainReport, config: TrainConfig) -> str:
    """Return the held-out table for people: a row per adapter, a column per writer."""
    roles = config.roles
    lines = ["held-out NLL, nats per token (rows: adapter, columns: who wrote the tokens)"]
    lines.append("".join(f"{name:>12}" for name in ("", *roles)))
    for name, scores in [("base", report.before), *report.after.items()]:
        lines.append(f"{name:>12}" + "".join(f"{scores[role].nll:12.4f}" for role in roles))
    lines += [
        f"{role}: {seconds:.0f} s, {config.out / role}" for role, seconds in report.seconds.items()
    ]
    return "\n".join(lines)


_RECIPE_OPTIONS: dict[str, tuple[type, str]] = {
    "rank": (int, "LoRA rank"),
    "alpha": (int, "LoRA alpha; the scaling is alpha / rank"),
    "steps": (int, "optimiser steps per role"),
    "batch": (int, "trajectories per step"),
    "lr": (float, "peak learning rate"),
    "warmup_steps": (int, "steps of linear warm-up"),
    "max_tokens": (int, "longest trajectory; turns that end later are not trained on"),
    "seed": (int, "seed of the weights and of the data order"),
    "targets": (str, f"which layers: {', '.join(TARGETS)}"),
    "dtype": (str, f"precision of the base model: {', '.join(DTYPES)}"),
}


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    defaults: dict[str, Any] = {
        f: TrainConfig.__dataclass_fields__[f].default for f in _RUN_DEFAULTS
    }
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder of episodes, or a JSONL file (below)")
    add("--out", type=Path, required=True, help="folder that gets one PEFT folder per role")
    add("--task", default=defaults["task"], help=f"{', '.join(TASKS)} (default %(default)s)")
    add("--role", action="append", help=f"repeatable (default: {', '.join(ROLES)})")
    add("--model", default=defaults["model"], help="alias, hub id or folder (default %(default)s)")
    add("--device", default=defaults["device"], help=f"{', '.join(DEVICES)} (default %(default)s)")
    add(
        "--heldout-episodes",
        type=int,
        default=defaults["heldout_episodes"],
        help="held-out trajectories to evaluate on, at most (default %(default)s)",
    )
    add(
        "--save-every", type=int, default=defaults["save_every"], help="steps (default %(default)s)"
    )
    add("--resume", action="store_true", help="continue an interrupted run of the same settings")
    add("--json", action="store_true", help="print the figures as one JSON object, last line")


_RUN_DEFAULTS = ("task", "model", "device", "heldout_episodes", "save_every")


def _add_recipe_options(parser: argparse.ArgumentParser) -> None:
    defaults = Recipe()
    group = parser.add_argument_group("recipe")
    for name, (kind, text) in _RECIPE_OPTIONS.items():
        default = getattr(defaults, name)
        group.add_argument(
            flag(name), type=kind, default=default, help=f"{text} (default {default})"
        )
