"""The options of `precache agents`, and the run: every episode under every policy, then the tables."""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path

from precache.cli.agents.players import API_KEY_VARIABLE
from precache.cli.options import adapter_pair, add_engine_options

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
    _add_player_options(parser)
    parser.set_defaults(func=run)


def _add_task_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "task", metavar="TASK", help="hotpotqa, scienceqa, or a workflow (name or YAML file)"
    )
    add = parser.add_argument_group("questions and tools").add_argument
    add(
        "--data",
        type=Path,
        help="folder of hotpotqa/ and scienceqa/ (or one of them), or a JSONL file of your questions",
    )
    add("--levels", help="comma-separated (default: all of the task)")
    add("--limit", type=int, metavar="N", help="questions, or recorded episodes, a level, at most")
    add("--corpus", type=Path, help="folder of HotpotQA files to search (default: --data)")
    add("--search-url", metavar="URL", help="let Search ask this SearXNG instead of the corpus")
    add("--tool-timeout", type=float, metavar="S", help="seconds (default 30)")


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("run").add_argument
    add("--policies", help="comma-separated; several are compared side by side (in process)")
    add("--mode", choices=("natural", "forced"), default="natural", help="(default natural)")
    add(
        "--recorded",
        type=Path,
        help="forced: an --out file, or a folder with TASK_episodes.jsonl (default: "
        "role_trajectories in --data), of which the held-out episodes are taken",
    )
    add("--repeats", type=int, metavar="R", help="times each question is played (default 1)")
    add("--seed", type=int, metavar="S", help="of what is sampled (default 0)")
    add("--temperature", type=float, metavar="T", help="(default 0, or 0.2 for several --repeats)")
    add("--out", type=Path, help="results, a JSON line per episode; a killed run goes on from it")
    add("--json", action="store_true", help="one JSON object as the last line")


def _add_player_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("an endpoint, instead of a model in this process").add_argument
    add("--base-url", metavar="URL", help="OpenAI-compatible, such as http://localhost:8000/v1")
    add("--api-key", metavar="KEY", help=f"(default: ${API_KEY_VARIABLE}, or none)")
    add(
        "--model-name",
        dest="model_names",
        type=adapter_pair,
        action="append",
        default=[],
        metavar="ROLE=NAME",
        help="what the endpoint calls a role's model; repeatable",
    )
    add("--endpoint-timeout", type=float, metavar="S", help="longest silence (default 600)")
    add = parser.add_argument_group("a model in this process").add_argument
    add("--model", help="hub id, folder or alias (default smollm2)")
    add_engine_options(parser, model=False)


def run(args: argparse.Namespace) -> int:
    """Play, or replay, every episode under every policy and print the tables."""
    from precache.agents.client import EndpointError
    from precache.agents.results import ResultsFile
    from precache.agents.workflow import load_workflow
    from precache.cli.agents import inputs, output, players

    workflow = load_workflow(args.task)
    inputs.check(args)
    players.check(args)
    policies = players.policies(args)
    items = inputs.recorded(args) if args.mode == "forced" else inputs.questions(args)
    settings = inputs.settings(args, workflow)
    with ExitStack() as stack:
        out = args.out or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "out.jsonl"
        results = stack.enter_context(ResultsFile(out, settings))
        try:
            for policy, client in players.clients(args, workflow, policies, stack):
                played = players.episodes(args, workflow, policy, client, items, results)
                output.show(played, f"{args.task} {policy}", len(items) * (args.repeats or 1))
        except EndpointError as error:
            if args.out is None:
                raise
            raise EndpointError(
                f"{error}\n{len(results.done)} finished episodes are in {out}; "
                "the same command goes on from there"
            ) from error
        output.report(list(results.done.values()), settings, as_json=args.json)
    return 0
