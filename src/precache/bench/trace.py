"""The controlled trace of the paper: who runs, how many new prompt tokens come, how many are decoded. Plain data.

A round is a long prompt for the planner (retrieved text, an observation), a short one for it, and a short one for every
actor; four rounds follow an opening one, and two turns of the reflector end the trace.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

ROUNDS = 4
OPENING_TOKENS = 512
LONG_DECODE, SHORT = 32, 8


@dataclass(frozen=True)
class Step:
    """One turn: ``prompt`` new tokens behind the trajectory so far, then ``output`` decoded tokens."""

    agent: str
    prompt: int
    output: int


@dataclass(frozen=True)
class Trace:
    """The turns of one trajectory."""

    steps: tuple[Step, ...]

    @property
    def prompt_tokens(self) -> int:
        return sum(step.prompt for step in self.steps)

    @property
    def output_tokens(self) -> int:
        return sum(step.output for step in self.steps)

    @property
    def tokens(self) -> int:
        """Length of the finished trajectory."""
        return self.prompt_tokens + self.output_tokens

    def fresh_prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        """Random token ids for the new part of every turn's prompt; the same for the same seed."""
        rng = random.Random(seed)
        return [[rng.randrange(vocab_size) for _ in range(step.prompt)] for step in self.steps]


def controlled_trace(chunk: int, agents: Sequence[str], *, rounds: int = ROUNDS) -> Trace:
    """The trace for a long prompt of ``chunk`` tokens a round.

    The first agent plans, the last reflects, those between act one after the other in every round. Of two agents the
    second does both; one agent does everything.
    """
    planner, reflector = agents[0], agents[-1]
    actors = agents[1:-1] or [reflector]
    steps = _round(planner, actors, OPENING_TOKENS)
    for _ in range(rounds):
        steps += _round(planner, actors, chunk)
    steps += [Step(reflector, LONG_DECODE, LONG_DECODE), Step(reflector, SHORT, SHORT)]
    return Trace(tuple(steps))


def _round(planner: str, actors: Sequence[str], chunk: int) -> list[Step]:
    plan = [Step(planner, chunk, LONG_DECODE), Step(planner, SHORT, SHORT)]
    return plan + [Step(actor, SHORT, SHORT) for actor in actors]
