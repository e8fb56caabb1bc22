"""The list of benchmarks. Each one's measuring is in precache.bench."""

from __future__ import annotations

import argparse

from precache.cli.bench import attention, memory, serving, turns

_EXAMPLE = """examples:
  precache bench turns --json
  precache bench memory --model llama-3.1-8b --agents 3,8

precache bench BENCHMARK --help explains the options of a benchmark.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `bench`."""
    parser = subparsers.add_parser(
        "bench",
        help="time to first token, throughput, memory, attention and serving on this machine",
        description="Measure this machine, or count what a model's cache takes.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    benches = parser.add_subparsers(
        title="benchmarks", dest="bench", metavar="BENCHMARK", required=True
    )
    for bench in (turns, attention, memory, serving):
        bench.add_parser(benches)
