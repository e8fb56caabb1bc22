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
REFLECT_PROMPT = 32


@dataclass(frozen=True)
class Step:
    """One turn: ``prompt`` new tokens behind the trajectory so far, then ``output`` decoded tokens."""

    agent: str
    prompt: int
    output: int


@dataclass(frozen=True)
class Trace:
    """The turns of one trajectory.

    ``shared`` is the share of its tokens, from the first on, that all agents see alike. What follows is another text
    for every agent, equally long, as when a role's own instructions or documents come before it.
    """

    steps: tuple[Step, ...]
    shared: float = 1.0

    @property
    def agents(self) -> tuple[str, ...]:
        """Who takes part, in the order of the first turns."""
        return tuple(dict.fromkeys(step.agent for step in self.steps))

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


class AgentViews:
    """What each agent has before it while a trace is played: token ids, the same number for all of them."""

    def __init__(self, trace: Trace, vocab_size: int) -> None:
        self._common = round(trace.tokens * trace.shared)
        self._vocab_size = vocab_size
        self._views: dict[str, list[int]] = {agent: [] for agent in trace.agents}

    def extend(self, agent: str, tokens: Sequence[int]) -> list[int]:
        """Append ``tokens`` as ``agent`` sees them, and what the others see instead; returns a copy of its view."""
        for turn, (name, view) in enumerate(self._views.items()):
            common = max(0, self._common - len(view))
            shift = 0 if name == agent else turn + 1  # other ids than the agent's own
            view += tokens[:common]
            view += [(token + shift) % self._vocab_size for token in tokens[common:]]
        return list(self._views[agent])


def controlled_trace(
    chunk: int,
    agents: Sequence[str],
    *,
    rounds: int = ROUNDS,
    decode: int = LONG_DECODE,
    shared: float = 1.0,
) -> Trace:
    """The trace for a long prompt of ``chunk`` tokens a round, after which ``decode`` tokens are said.

    The first agent plans, the last reflects, those between act one after the other in every round. Of two agents the
    second does both; one agent does everything.
    """
    planner, reflector = agents[0], agents[-1]
    actors = agents[1:-1] or [reflector]
    steps = _round(planner, actors, OPENING_TOKENS, decode)
    for _ in range(rounds):
        steps += _round(planner, actors, chunk, decode)
    steps += [Step(reflector, REFLECT_PROMPT, decode), Step(reflector, SHORT, SHORT)]
    return Trace(tuple(steps), shared)


def chunk_for(
    tokens: int, agents: Sequence[str], *, rounds: int = ROUNDS, decode: int = LONG_DECODE
) -> int:
    """The chunk with which the trace of these agents is nearest to ``tokens`` long; less than 1 if none is."""
    without = controlled_trace(0, agents, rounds=rounds, decode=decode).tokens
    return round((tokens - without) / rounds)


def _round(planner: str, actors: Sequence[str], chunk: int, decode: int) -> list[Step]:
    plan = [Step(planner, chunk, decode), Step(planner, SHORT, SHORT)]
    return plan + [Step(actor, SHORT, SHORT) for actor in actors]
