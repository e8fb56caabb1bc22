"""What is played: questions or recorded episodes, the corpus, and the settings that name a run."""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precache.cli.options import POLICY_SETTINGS, engine_settings
from precache.cli.values import flag, split_names
from precache.errors import ConfigError

if TYPE_CHECKING:
    from precache.agents.corpus import Corpus
    from precache.agents.runner import Recorded, RunOptions
    from precache.agents.workflow import Workflow
    from precache.tasks import Question

DEFAULT_MODEL = "smollm2"
RECORDED_FOLDER = "role_trajectories"  # in --data
SAMPLED_TEMPERATURE = 0.2  # where repeats have to differ and no temperature was asked for


_AT_LEAST: dict[str, tuple[float, str]] = {
    "limit": (1, "an integer from 1"),
    "repeats": (1, "an integer from 1"),
    "tool_timeout": (0.001, "seconds above 0"),
    "temperature": (0, "a number from 0"),
}
_SHAPING = (
    "dtype",
    "schedule",
    *POLICY_SETTINGS,
)  # engine settings that change what is said or measured
_NATURAL_ONLY = ("repeats", "seed", "temperature", "corpus", "search_url", "tool_timeout")


def check(args: argparse.Namespace) -> None:
    """Raise ConfigError for values out of range and for options that do not go together."""
    for name, (least, allowed) in _AT_LEAST.items():
        value = getattr(args, name)
        if value is not None and value < least:
            raise ConfigError(flag(name), value, allowed)
    if args.mode == "forced":
        _check_forced(args)
    elif args.data is None:
        raise ConfigError("--data", None, "the folder of the task's files, or a file of questions")
    elif args.recorded is not None:
        raise ConfigError("--recorded", str(args.recorded), "given with --mode forced only")


def _check_forced(args: argparse.Namespace) -> None:
    for name in _NATURAL_ONLY:
        value = getattr(args, name)
        if value is not None:
            raise ConfigError(flag(name), str(value), "none in forced mode: the text is given")
    if (args.recorded is None) == (args.data is None):
        got = None if args.recorded is None else f"{args.recorded} and --data {args.data}"
        raise ConfigError("--recorded", got, "either --recorded or --data in forced mode")


def questions(args: argparse.Namespace) -> list[Question]:
    """The questions of the task's levels, or a user's own."""
    from precache.tasks import QUESTION_FILES, load_plain_questions

    source = QUESTION_FILES.get(args.task)
    if source is None:
        return load_plain_questions(args.data)[: args.limit]
    levels = _levels(args) or list(source.levels)
    found = source.load(args.data, levels)
    return [item for x in levels for item in [q for q in found if q.level == x][: args.limit]]


def recorded(args: argparse.Namespace) -> list[Recorded]:
    """The episodes that forced mode says again. Raises ConfigError if there is none."""
    from precache.agents.recorded import read_recorded

    path = recorded_path(args)
    found = read_recorded(path, args.task)
    levels = _levels(args) or list(dict.fromkeys(item.level for item in found))
    chosen = [r for x in levels for r in [i for i in found if i.level == x][: args.limit]]
    if not chosen:
        raise ConfigError("--recorded", str(path), "a place with episodes of the levels asked for")
    return chosen


def recorded_path(args: argparse.Namespace) -> Path:
    """Where the recorded episodes are: as given, or what comes with the task's files."""
    if args.recorded is not None:
        return Path(args.recorded)
    nested = Path(args.data) / RECORDED_FOLDER
    return nested if nested.is_dir() else Path(args.data)


def _levels(args: argparse.Namespace) -> list[str]:
    return list(dict.fromkeys(split_names(args.levels or "")))


def corpus(args: argparse.Namespace, workflow: Workflow) -> Corpus | None:
    """Every paragraph of the HotpotQA files that are there, whatever levels are played."""
    from precache.agents.corpus import Corpus
    from precache.tasks.hotpotqa import HOTPOTQA_FILES

    folder = args.corpus or args.data
    levels = [x for x in HOTPOTQA_FILES.levels if HOTPOTQA_FILES.path(folder, x).is_file()]
    if args.corpus is not None and not levels:
        raise ConfigError("--corpus", str(folder), "a folder with files of HotpotQA")
    if not levels or not any(action.tool for action in workflow.actions.values()):
        return None
    return Corpus(p for q in HOTPOTQA_FILES.load(folder, levels) for p in q.passages)


def options(args: argparse.Namespace) -> RunOptions:
    """What all episodes have in common; what was not given keeps the run's own default."""
    from precache.agents.runner import RunOptions

    given = {
        "repeats": args.repeats,
        "seed": args.seed,
        "temperature": args.temperature,
        "tool_timeout_s": args.tool_timeout,
    }
    if args.temperature is None and (args.repeats or 1) > 1:
        given["temperature"] = SAMPLED_TEMPERATURE
    return RunOptions(**{name: value for name, value in given.items() if value is not None})


def settings(args: argparse.Namespace, workflow: Workflow) -> dict[str, Any]:
    """Return what must be equal for two runs to share a results file; the policy need not."""
    run = options(args)
    engine = {name: str(value) for name, value in engine_settings(args).items() if name in _SHAPING}
    return {
        **({"engine": engine} if engine else {}),
        "task": args.task,
        "workflow": hashlib.sha256(repr(workflow).encode()).hexdigest()[:16],
        "model": None if args.base_url else args.model or DEFAULT_MODEL,
        "adapters": {name: str(path) for name, path in args.adapters},
        "recorded": str(recorded_path(args)) if args.mode == "forced" else None,
        "seed": run.seed,
        "temperature": run.temperature,
        "corpus": None if args.corpus is None else str(args.corpus),
        "search_url": args.search_url,
    }
