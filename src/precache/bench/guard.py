"""The guard of `bench turns`: nothing is timed unless the rows beside the engine's compute what ``nonshared`` does."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from precache import Engine
from precache.bench.player import Likely, Peer
from precache.bench.trace import Step, Trace
from precache.errors import PrecacheError

PROMPT, OUTPUT, ROUNDS = 16, 6, 2  # the guard's turns: every agent in every round
TOLERANCE = {"float32": 0.01, "bfloat16": 1.0, "float16": 0.2}  # of a log-probability, in nats


class GuardError(PrecacheError):
    """A row and nonshared disagree: one of them is wrong, and its time means nothing."""

    def __init__(self, row: str, agent: str, turn: int, got: float, allowed: float) -> None:
        self.row = row
        self.got = got
        self.allowed = allowed
        super().__init__(
            f"{row} and nonshared differ at turn {turn} ({agent}): "
            f"got {got:.2e} nats between log-probabilities of the same token, allowed are {allowed:g}"
        )


def largest_difference(
    row: str, peer: Peer, engine: Engine, agents: Sequence[str], seed: int
) -> float:
    """Largest difference of a log-probability, in nats, between a peer and ``engine`` (nonshared) on a short trace.

    The tokens compared are the likeliest ones of every output token. Raises GuardError above the dtype's TOLERANCE.
    """
    trace = Trace(tuple(Step(agent, PROMPT, OUTPUT) for agent in agents) * ROUNDS)
    allowed = TOLERANCE[str(engine.model.dtype).removeprefix("torch.")]
    largest = 0.0
    trajectory: list[int] = []
    prompts = trace.fresh_prompts(engine.model.shape.vocab_size, seed)
    for turn, (step, fresh) in enumerate(zip(trace.steps, prompts, strict=True)):
        trajectory += fresh
        likely = peer.likely(step.agent, trajectory, step.output)
        output = [choice.token_id for choice in likely]
        difference = _difference(likely, engine.score(step.agent, trajectory, output))
        if not difference <= allowed:
            raise GuardError(row, step.agent, turn, difference, allowed)
        largest = max(largest, difference)
        trajectory += output
    peer.reset()
    engine.reset()
    return largest


def _difference(likely: Sequence[Likely], logits: torch.Tensor) -> float:
    """``logits``: [len(likely), vocab]."""
    ours = logits.cpu().log_softmax(-1)
    differences = [
        (row[list(choice.logprobs)] - torch.tensor(list(choice.logprobs.values()))).abs().max()
        for row, choice in zip(ours, likely, strict=True)
    ]
    return float(torch.stack(differences).max())
