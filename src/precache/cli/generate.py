"""`precache generate`: one turn of one agent, streamed to the terminal."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precache.cli.options import adapters_from_args, add_engine_options, engine_from_args
from precache.cli.values import given
from precache.errors import ConfigError
from precache.request import GenerationOutput, SamplingParams

if TYPE_CHECKING:
    from precache.chat import Prompt

_EXAMPLE = """examples:
  precache generate smollm2 --chat --prompt "What is the capital of France?" --max-tokens 16
  precache generate smollm2 --adapter plan=adapters/plan --prompt-file question.txt --stop "\\n"
  cat question.txt | precache generate smollm2 --prompt-file - --json
"""

_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `generate`."""
    parser = subparsers.add_parser(
        "generate",
        help="one turn of one agent, streamed",
        description="Run one turn of one agent and print it as it grows.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_engine_options(parser)
    _add_prompt_options(parser)
    _add_sampling_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Generate as `args` say. Options are checked before the model is loaded."""
    params = sampling_from_args(args)
    agent = _agent(args)
    prompt = _prompt(args)
    engine = engine_from_args(args)
    output = None
    for chunk in engine.stream(agent, prompt, params=params):
        output = chunk.output
        if not args.json:
            print(chunk.text, end="", flush=True)
    assert output is not None, "a stream ends with its output"
    print(json.dumps(_report(output)) if args.json else "")
    print(_summary(output), file=sys.stderr)
    return 0


def sampling_from_args(args: argparse.Namespace) -> SamplingParams:
    """Build the checked parameters; options left out keep the defaults of SamplingParams."""
    return SamplingParams(
        **given(args, _SAMPLING), stop=tuple(_unescaped(stop) for stop in args.stop)
    )


def _add_prompt_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompt")
    group.add_argument("--agent", help="who speaks (default: the only adapter, else base)")
    text = group.add_mutually_exclusive_group(required=True)
    text.add_argument("--prompt", help="the text")
    text.add_argument("--prompt-file", metavar="FILE", help="file with the text, - is stdin")
    group.add_argument(
        "--chat", action="store_true", help="send it as a user message, in the model's template"
    )


def _add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, help="default: the room in the context window")
    group.add_argument("--temperature", type=float, help="default 0: greedy")
    group.add_argument(
        "--top-p", type=float, help="sample among the likeliest tokens that hold this share"
    )
    group.add_argument("--top-k", type=int, help="sample among this many likeliest tokens")
    group.add_argument(
        "--min-p", type=float, help="leave out tokens below this share of the likeliest one"
    )
    group.add_argument("--seed", type=int, help="default: a fresh one")
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        help=r"end before this text, \n is a line end; repeatable",
    )


def _agent(args: argparse.Namespace) -> str:
    if args.agent is not None:
        return str(args.agent)
    names = list(adapters_from_args(args))
    if len(names) > 1:
        raise ConfigError("--agent", None, f"base or one of {names}")
    return names[0] if names else "base"


def _prompt(args: argparse.Namespace) -> Prompt:
    text = args.prompt if args.prompt is not None else _read(args.prompt_file)
    return [{"role": "user", "content": text}] if args.chat else text


def _read(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--prompt-file", file, f"a readable UTF-8 file ({error})") from error


def _unescaped(stop: str) -> str:
    return stop.replace("\\n", "\n").replace("\\t", "\t")


def _report(output: GenerationOutput) -> dict[str, Any]:
    return {
        "agent": output.adapter_name,
        "text": output.text,
        "finish_reason": output.finish_reason,
        "token_ids": list(output.token_ids),
        "usage": asdict(output.usage),
        "timings": asdict(output.timings),
    }


def _summary(output: GenerationOutput) -> str:
    usage, timings = output.usage, output.timings
    return (
        f"[{output.adapter_name}: {usage.prompt_tokens} prompt tokens, {usage.completion_tokens} "
        f"generated, ended by {output.finish_reason}, first token after {timings.ttft_s:.2f} s, "
        f"{timings.total_s:.2f} s in all]"
    )
