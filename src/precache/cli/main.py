"""The command ``precache``. Owns the list of commands and how errors end a run; each command has a module of its own.

Only the module of the chosen command is imported, so help and mistakes answer at once.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from precache import __version__
from precache.errors import PrecacheError

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130


class Command(NamedTuple):
    """One line of the help; ``precache.cli.<name>`` holds add_parser(subparsers), which sets func=run."""

    summary: str
    example: str


COMMANDS = {
    "demo": Command(
        "three role agents solve a question over one shared cache, and what that saved",
        "precache demo",
    ),
    "serve": Command(
        "OpenAI-compatible server, one model name per adapter",
        "precache serve smollm2 --adapter plan=adapters/plan --adapter action=adapters/action",
    ),
    "generate": Command(
        "one turn of one agent, streamed",
        'precache generate smollm2 --adapter plan=adapters/plan --prompt "Question: ..."',
    ),
    "inspect": Command(
        "what an adapter folder holds, and which sharing policies it allows",
        "precache inspect adapters/plan adapters/action",
    ),
    "train": Command(
        "role adapters (PEFT LoRA) from recorded trajectories",
        "precache train --task scienceqa --data role_trajectories --out adapters",
    ),
    "agents": Command(
        "plan, act and reflect agents on HotpotQA, ScienceQA or a workflow of yours, scored",
        "precache agents scienceqa --data data --policies nonshared,rebaseshared --limit 20",
    ),
    "compare": Command(
        "how far each sharing policy moves your agents, measured on recorded trajectories",
        "precache compare smollm2 --adapter plan=adapters/plan --trajectories runs.jsonl",
    ),
    "bench": Command(
        "time to first token, throughput and memory of every policy on this machine",
        "precache bench turns --json",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 2 for an error of the user's, 130 for Ctrl-C."""
    argv = sys.argv[1:] if argv is None else list(argv)
    # Read when torch is loaded. Threads that spin while they wait for each other make a small model ten times slower
    # on a machine where anything else runs.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        args = parse_args(argv)
        status: int = args.func(args)
        sys.stdout.flush()
    except PrecacheError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # `precache ... | head`: the reader has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line. ``passed_on`` are the arguments of `serve` after ``--``, which are another program's."""
    passed_on: list[str] = []
    if "serve" in argv[:1] and "--" in argv:
        cut = list(argv).index("--")
        argv, passed_on = argv[:cut], list(argv[cut + 1 :])
    args = build_parser(argv).parse_args(argv)
    args.passed_on = passed_on
    return args


def build_parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser for this command line: all commands by name, the options of the chosen one only."""
    parser = argparse.ArgumentParser(
        prog="precache",
        description="One KV cache for all the LoRA agents that work on one backbone.",
        epilog=_command_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"precache {__version__}")
    commands = parser.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", required=True, help="see below"
    )
    chosen = argv[0] if argv else None
    if chosen in COMMANDS:
        importlib.import_module(f"precache.cli.{chosen}").add_parser(commands)
    else:
        for name in COMMANDS:
            commands.add_parser(name)
    return parser


def _command_help() -> str:
    lines = [
        f"  {name:<9} {c.summary}\n            $ {c.example}\n" for name, c in COMMANDS.items()
    ]
    return "\n".join([*lines, "precache COMMAND --help explains the options of a command."])
