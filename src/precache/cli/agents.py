"""`precache agents`: role agents work on a task's questions. Owns the options and the progress, not the episodes."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from precache.cli.options import adapter_pair, adapters_from_args, add_engine_options
from precache.errors import ConfigError

if TYPE_CHECKING:
    from precache import Engine
    from precache.agents.client import CompletionClient
    from precache.agents.corpus import Corpus
    from precache.agents.results import EpisodeResult
    from precache.agents.runner import Recorded, RunOptions
    from precache.agents.workflow import Workflow
    from precache.tasks import Question

DEMO_ROLES = ("plan", "action", "reflect")
SAMPLED_TEMPERATURE = 0.2  # where repeats have to differ and no temperature was asked for

_T = TypeVar("_T")

_EXAMPLE = """examples:
  precache agents hotpotqa --data ../shared/data --levels easy,hard --policies nonshared,rebaseshared --limit 20 \\
      --adapter plan=adapters/plan --adapter action=adapters/action --adapter reflect=adapters/reflect
  precache agents scienceqa --data ../shared/data --base-url http://localhost:8000/v1 --policy rebaseshared
  precache agents my_roles.yaml --data my_questions.jsonl --adapter writer=a/writer --adapter critic=a/critic

TASK is hotpotqa, scienceqa, or a workflow of your own (docs/agents.md). Episodes already in --out are not played again.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `agents`."""
    parser = subparsers.add_parser(
        "agents",
        help="plan, act and reflect agents on HotpotQA, ScienceQA or your own workflow",
        description="Run role agents over the questions of a task and score what they answer.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_task_options(parser)
    _add_run_options(parser)
    parser.add_argument("--model", default="smollm2", help="in process (default %(default)s)")
    add_engine_options(parser, model=False)
    parser.set_defaults(func=run)


def _add_task_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("task", metavar="TASK", help="hotpotqa, scienceqa, or a workflow (name or YAML file)")
    add("--data", type=Path, required=True, help="folder of the task files, or your questions")
    add("--levels", help="comma-separated (default: all of the task)")
    add("--limit", type=int, help="at most this many questions, or recorded episodes, a level")
    add("--corpus", type=Path, help="folder of HotpotQA files to search (default: --data)")
    add("--search-url", help="let Search ask this SearXNG instance instead of the corpus")
    add("--tool-timeout", type=float, default=30.0, help="seconds (default %(default)s)")


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--policies", help="comma-separated; several are compared side by side (in process)")
    add("--mode", choices=("natural", "forced"), default="natural", help="(default %(default)s)")
    add("--recorded", type=Path, help="forced: an --out file, or a folder of recorded episodes")
    add("--repeats", type=int, default=1, help="times each question is played (default 1)")
    add("--seed", type=int, default=0, help="(default %(default)s)")
    add("--temperature", type=float, help="(default 0, or 0.2 where --repeats is above 1)")
    add("--base-url", help="an OpenAI-compatible endpoint instead of a model in this process")
    add("--api-key", default="none", help="of the endpoint (default %(default)s)")
    add(
        "--model-name",
        dest="model_names",
        type=adapter_pair,
        action="append",
        default=[],
        metavar="ROLE=NAME",
        help="what the endpoint calls a role's model; repeatable",
    )
    add("--out", type=Path, help="results, a JSON line per episode; a killed run goes on from it")
    add("--json", action="store_true", help="one JSON object as the last line")


def run(args: argparse.Namespace) -> int:
    """Play, or replay, every episode under every policy and print the tables."""
    from precache.agents.results import ResultsFile
    from precache.agents.workflow import load_workflow

    workflow = load_workflow(args.task)
    policies = _policies(args)
    _check(args)
    items = _recorded(args) if args.mode == "forced" else _questions(args, workflow)
    with ExitStack() as stack:
        out = args.out or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "out.jsonl"
        results = stack.enter_context(ResultsFile(out, _settings(args, workflow)))
        for policy, client in _clients(args, workflow, policies, stack):
            played = _episodes(args, workflow, policy, client, items, results)
            for result in _progress(played, f"{args.task} {policy}", len(items) * args.repeats):
                _show(result)
        _report(args, list(results.done.values()))
    return 0


def _check(args: argparse.Namespace) -> None:
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
    if args.base_url and args.adapters:
        raise ConfigError("--adapter", args.adapters[0][0], "none with --base-url")


def _policies(args: argparse.Namespace) -> list[str]:
    if args.policy and args.policies:
        raise ConfigError("--policies", args.policies, "either --policy or --policies")
    text = args.policies or args.policy or ("endpoint" if args.base_url else "rebaseshared")
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if args.base_url:
        if len(names) != 1:
            raise ConfigError(
                "--policies",
                text,
                "one name with --base-url: a server has one policy; "
                "run once per server with the same --out",
            )
        return names
    from precache.engine.policies import POLICIES

    if not names or set(names) - set(POLICIES):
        raise ConfigError("--policies", text, f"names among {sorted(POLICIES)}")
    return names


# -- what is played ------------------------------------------------------------------------------


def _questions(args: argparse.Namespace, workflow: Workflow) -> list[Question]:
    from precache.tasks import QUESTION_FILES, load_plain_questions

    source = QUESTION_FILES.get(args.task)
    if source is None:
        return load_plain_questions(args.data)[: args.limit]
    levels = _levels(args) or list(source.levels)
    questions = source.load(args.data, levels)
    return [item for x in levels for item in [q for q in questions if q.level == x][: args.limit]]


def _recorded(args: argparse.Namespace) -> list[Recorded]:
    from precache.agents.recorded import read_recorded

    found = read_recorded(args.recorded, args.task)
    levels = _levels(args) or list(dict.fromkeys(item.level for item in found))
    chosen = [r for x in levels for r in [i for i in found if i.level == x][: args.limit]]
    if not chosen:
        raise ConfigError("--recorded", str(args.recorded), "episodes of the levels asked for")
    return chosen


def _levels(args: argparse.Namespace) -> list[str]:
    return list(dict.fromkeys(x.strip() for x in (args.levels or "").split(",") if x.strip()))


def _corpus(args: argparse.Namespace, workflow: Workflow) -> Corpus | None:
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


def _options(args: argparse.Namespace) -> RunOptions:
    from precache.agents.runner import RunOptions

    temperature = args.temperature
    if temperature is None:
        temperature = SAMPLED_TEMPERATURE if args.repeats > 1 else 0.0
    return RunOptions(args.repeats, args.seed, temperature, args.tool_timeout)


def _settings(args: argparse.Namespace, workflow: Workflow) -> dict[str, Any]:
    """Return what must be equal for two runs to share a results file; the policy need not."""
    digest = hashlib.sha256(repr(workflow).encode()).hexdigest()[:16]
    return {
        "task": args.task,
        "workflow": digest,
        "model": None if args.base_url else args.model,
        "adapters": {name: str(path) for name, path in args.adapters},
        "recorded": None if args.recorded is None else str(args.recorded),
        "seed": args.seed,
        "temperature": _options(args).temperature,
        "search_url": args.search_url,
    }


# -- who plays -----------------------------------------------------------------------------------


def _clients(
    args: argparse.Namespace, workflow: Workflow, policies: Sequence[str], stack: ExitStack
) -> Iterator[tuple[str, CompletionClient]]:
    from precache.agents import EngineClient, HttpClient

    if args.base_url:
        models = {role: str(name) for role, name in args.model_names}
        yield policies[0], HttpClient(args.base_url, api_key=args.api_key, models=models)
        return
    loaded = stack.enter_context(_engine(args, workflow, policies[0], stack))
    for policy in policies:
        engine = loaded if policy == policies[0] else loaded.with_policy(policy)
        yield policy, EngineClient(engine)
        engine.reset()


def _engine(args: argparse.Namespace, workflow: Workflow, policy: str, stack: ExitStack) -> Engine:
    from precache.cli.options import engine_settings, quiet_in_pipes

    adapters = adapters_from_args(args)
    if not adapters and args.model == "smollm2" and set(workflow.roles) == set(DEMO_ROLES):
        print("no --adapter given: the demo's adapters (trained on ScienceQA) are used", flush=True)
        folder = stack.enter_context(as_file(files("precache.demo") / "adapters"))
        adapters = {role: folder / role for role in DEMO_ROLES}
    if missing := [role for role in workflow.roles if role not in {*adapters, "base"}]:
        raise ConfigError("--adapter", sorted(adapters), f"also one each for the roles {missing}")
    quiet_in_pipes()
    from precache import Engine

    settings = {**engine_settings(args), "policy": policy}
    return Engine.load(args.model, adapters=adapters, **settings)


def _episodes(
    args: argparse.Namespace,
    workflow: Workflow,
    policy: str,
    client: CompletionClient,
    items: Sequence[Any],
    results: Any,
) -> Iterator[EpisodeResult]:
    from precache.agents.runner import run_forced, run_natural
    from precache.agents.web_search import WebSearch

    if args.mode == "forced":
        return run_forced(workflow, client, policy, items, results)
    search = WebSearch(args.search_url) if args.search_url else None
    return run_natural(
        workflow,
        client,
        policy,
        items,
        results,
        _options(args),
        corpus=_corpus(args, workflow),
        search=search,
    )


# -- what is shown -------------------------------------------------------------------------------


def _progress(items: Iterable[_T], label: str, total: int) -> Iterable[_T]:
    from tqdm import tqdm

    bar: Iterable[_T] = tqdm(
        items, desc=label, total=total, unit="episode", disable=not sys.stderr.isatty()
    )
    return bar


def _show(result: EpisodeResult) -> None:
    """One line per episode where no bar is shown."""
    if sys.stderr.isatty():
        return
    key, episode = result.key, result.episode
    if key.mode == "natural":
        said = f"{episode['outcome']}, answer {episode['answer']!r}"
    else:
        said = episode["error"] or "replayed"
    print(f"{key.policy} {key.level} {key.question_id}: {said}, {result.seconds:.1f} s", flush=True)


def _report(args: argparse.Namespace, results: Sequence[EpisodeResult]) -> None:
    from precache.agents.report import forced_rows, natural_rows
    from precache.agents.tables import format_forced, format_natural

    natural, forced = natural_rows(results), forced_rows(results)
    if natural:
        print("\n" + format_natural(natural))
    if forced:
        print("\n" + format_forced(forced))
    if args.json:
        print(
            json.dumps(
                {"rows": [_row(row) for row in natural], "forced": [_row(r) for r in forced]}
            )
        )


def _row(row: Any) -> dict[str, Any]:
    """Return a row with its estimates as objects."""
    return {name: _plain(value) for name, value in asdict(row).items()}


def _plain(value: Any) -> Any:
    if hasattr(value, "_asdict"):
        return value._asdict()
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value
