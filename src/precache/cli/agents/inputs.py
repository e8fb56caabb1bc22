"""What is played: questions or recorded episodes, the corpus, and the settings that name a run."""

from __future__ import annotations

import argparse
import hashlib
from typing import TYPE_CHECKING, Any

from precache.errors import ConfigError

if TYPE_CHECKING:
    from precache.agents.corpus import Corpus
    from precache.agents.runner import Recorded, RunOptions
    from precache.agents.workflow import Workflow
    from precache.tasks import Question

SAMPLED_TEMPERATURE = 0.2  # where repeats have to differ and no temperature was asked for


def check(args: argparse.Namespace) -> None:
    """Raise ConfigError for options that do not go together."""
    for name in ("limit", "repeats"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name}", value, "an integer from 1")
    if args.mode == "forced" and args.repeats != 1:
        raise ConfigError("--repeats", args.repeats, "1 in forced mode: the text is given")
    if args.mode == "forced" and args.recorded is None:
        raise ConfigError("--recorded", None, "a file or folder of episodes in forced mode")
    if args.mode == "natural" and args.recorded is not None:
        raise ConfigError("--recorded", str(args.recorded), "given in forced mode only")


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

    found = read_recorded(args.recorded, args.task)
    levels = _levels(args) or list(dict.fromkeys(item.level for item in found))
    chosen = [r for x in levels for r in [i for i in found if i.level == x][: args.limit]]
    if not chosen:
        raise ConfigError("--recorded", str(args.recorded), "episodes of the levels asked for")
    return chosen


def _levels(args: argparse.Namespace) -> list[str]:
    return list(dict.fromkeys(x.strip() for x in (args.levels or "").split(",") if x.strip()))


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
    """What all episodes have in common."""
    from precache.agents.runner import RunOptions

    temperature = args.temperature
    if temperature is None:
        temperature = SAMPLED_TEMPERATURE if args.repeats > 1 else 0.0
    return RunOptions(args.repeats, args.seed, temperature, args.tool_timeout)


def settings(args: argparse.Namespace, workflow: Workflow) -> dict[str, Any]:
    """Return what must be equal for two runs to share a results file; the policy need not."""
    digest = hashlib.sha256(repr(workflow).encode()).hexdigest()[:16]
    return {
        "task": args.task,
        "workflow": digest,
        "model": None if args.base_url else args.model,
        "adapters": {name: str(path) for name, path in args.adapters},
        "recorded": None if args.recorded is None else str(args.recorded),
        "seed": args.seed,
        "temperature": options(args).temperature,
        "search_url": args.search_url,
    }
