"""Plays trajectories against a server: they start at random moments, and the turns of each follow one another."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field

from precache.bench.serving.client import Turn, run_turn
from precache.bench.serving.process import ServedModel
from precache.bench.trace import Trace


@dataclass(frozen=True)
class Load:
    """What is offered: ``trajectories`` plays of a trace, whose turns would come ``qps`` times a second."""

    trace: Trace
    qps: float
    trajectories: int
    vocab_size: int

    def starts(self, seed: int) -> list[float]:
        """When each trajectory starts, in seconds; the first at once."""
        rng = random.Random(seed)
        starts = [0.0]
        while len(starts) < self.trajectories:
            starts.append(starts[-1] + rng.expovariate(self.qps / len(self.trace.steps)))
        return starts


@dataclass
class Play:
    """What a load gave: the turns of every trajectory, in order, and the largest share of cache blocks in use."""

    trajectories: list[list[Turn]] = field(default_factory=list)
    peak_blocks: int = 0
    wall_s: float = 0.0


def play(server: ServedModel, load: Load, seed: int) -> Play:
    """Play a load. Every trajectory has a thread; raises what the first failing one raised."""
    # Other tokens for every rate, so that nothing is found that another load has left in the cache.
    seed = seed * 7919 + round(load.qps * 1000)
    starts = load.starts(seed)
    results: list[list[Turn]] = [[] for _ in starts]
    errors: list[Exception] = []
    began = time.perf_counter()

    def run(number: int) -> None:
        time.sleep(max(0.0, began + starts[number] - time.perf_counter()))
        try:
            _play_trajectory(server, load, seed * 101 + number, results[number])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(starts))]
    num_blocks = server.num_blocks()
    with server.watched() as usage:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    wall_s = time.perf_counter() - began
    return Play(results, round(max(usage) * num_blocks), wall_s)


def _play_trajectory(server: ServedModel, load: Load, seed: int, turns: list[Turn]) -> None:
    trajectory: list[int] = []
    prompts = load.trace.fresh_prompts(load.vocab_size, seed)
    for step, fresh in zip(load.trace.steps, prompts, strict=True):
        trajectory += fresh
        turn = run_turn(server.port, step.agent, trajectory, step.output)
        turns.append(turn)
        trajectory += turn.token_ids
