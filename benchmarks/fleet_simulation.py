"""What routing, eviction and offload do to many trajectories on several replicas, by simulation.

    python benchmarks/fleet_simulation.py
    python benchmarks/fleet_simulation.py --replicas 16 --trajectories 2000 --cache-memory 60GiB

Costs are the formulas of precache.bench.physics at the rates given: operations a second of a prefill and bytes a second
of a decode step, as `benchmarks/predict_turns.py` reports them for a machine. The defaults are round figures for one
data-centre GPU, not measured here. A replica serves one turn at a time. Prints a Markdown table.
"""

from __future__ import annotations

import argparse

from precache.bench.fleet import Fleet, Load, Rates, simulate
from precache.bench.physics import METHODS, LoraSize, ModelSize
from precache.bench.shapes import model_config
from precache.bench.trace import controlled_trace
from precache.config import parse_size

CASES = (
    ("nonshared", "trajectory"),
    ("nonshared", "adapter"),
    ("nonshared", "random"),
    ("fullshared", "trajectory"),
    ("prelrshared", "trajectory"),
    ("prelrshared", "adapter"),
    ("prelrshared", "random"),
    ("rebaseshared", "trajectory"),
)


def main() -> None:
    """Simulate every case and print the table."""
    args = options()
    size = ModelSize.of(model_config(args.model))
    names = [f"agent{number}" for number in range(args.agents)]
    trace = controlled_trace(args.chunk, names)
    load = Load(trace, args.trajectories, args.finished, args.think)
    print(
        f"{args.model}, {args.agents} agents, {args.trajectories} trajectories of {trace.tokens} tokens, "
        f"{args.replicas} replicas with {args.cache_memory} of cache\n"
    )
    print("| policy | routing | offload | turns/s | TTFT p50 s | p90 s | reused | evictions |")
    print("|---|---|---|---|---|---|---|---|")
    for policy, routing in CASES:
        for offload in (0.0, args.offload * 1e9):
            outcome = simulate(
                size,
                LoraSize(args.agents, args.rank),
                METHODS[policy],
                Fleet(args.replicas, parse_size(args.cache_memory), routing),
                load,
                Rates(args.flops * 1e12, args.read * 1e9, offload),
            )
            print(
                f"| {policy} | {routing} | {'yes' if offload else 'no'} | {outcome.turns_per_s:.2f} "
                f"| {outcome.ttft_p50_s:.2f} | {outcome.ttft_p90_s:.2f} | {outcome.reused:.1%} "
                f"| {outcome.evictions} |"
            )


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="llama-3.1-8b", help="built-in name, folder or config.json")
    add("--agents", type=int, default=8)
    add("--rank", type=int, default=8)
    add("--chunk", type=int, default=1024, help="as in `precache bench turns`")
    add("--replicas", type=int, default=8)
    add("--trajectories", type=int, default=400, help="in flight at the same time")
    add("--finished", type=int, default=800, help="trajectories played to their end")
    add("--think", type=float, default=20.0, help="seconds between turns")
    add("--cache-memory", default="40GiB", help="of each replica")
    add("--flops", type=float, default=300.0, help="Top/s of a prefill")
    add("--read", type=float, default=2000.0, help="GB/s of a decode step")
    add("--offload", type=float, default=20.0, help="GB/s from offload storage")
    return parser.parse_args()


if __name__ == "__main__":
    main()
