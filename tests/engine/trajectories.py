"""One trajectory, played by the engine and by the slow reference, turn by turn on the same tokens."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from precache import Engine
from reference.lora import read_adapter
from reference.policies import ReferenceState

FIRST_ID = 10  # above the special tokens
VOCAB = 120
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Step:
    """A turn: who runs, how many new prompt tokens come, how many tokens are said."""

    agent: str
    prompt: int
    output: int


STEPS = (
    Step("plan", 17, 5),
    Step("action", 2, 3),
    Step("reflect", 6, 4),
    Step("plan", 1, 1),
    Step("base", 3, 2),
    Step("action", 4, 6),
    Step("reflect", 1, 2),
)


@dataclass
class Played:
    """What an engine made of a trajectory: per turn the logits of the output, and tokens reused."""

    logits: list[Tensor] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


def script(steps: Sequence[Step], seed: int = 0) -> list[tuple[str, list[int], list[int]]]:
    """(agent, new prompt tokens, output tokens) for every turn."""
    rng = random.Random(seed)

    def draw(count: int) -> list[int]:
        return [rng.randrange(FIRST_ID, VOCAB) for _ in range(count)]

    return [(step.agent, draw(step.prompt), draw(step.output)) for step in steps]


def play_engine(engine: Engine, steps: Sequence[Step], seed: int = 0) -> Played:
    played = Played()
    for agent, prompt, output in script(steps, seed):
        played.token_ids += prompt
        before = engine.stats().reused_tokens
        played.logits.append(engine.score(agent, played.token_ids, output))
        played.cached.append(engine.stats().reused_tokens - before)
        played.token_ids += output
    return played


def reference_state(model: str, adapters: Mapping[str, Path], policy: str) -> ReferenceState:
    stock = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    return ReferenceState(
        stock, {name: read_adapter(path) for name, path in adapters.items()}, policy
    )


def play_reference(
    state: ReferenceState, steps: Sequence[Step], seed: int = 0
) -> list[Tensor]:
    logits, unprocessed = [], []
    for agent, prompt, output in script(steps, seed):
        new = [*unprocessed, *prompt, *output[:-1]]
        everything = state.turn(None if agent == "base" else agent, new)
        logits.append(everything[-len(output) :])
        unprocessed = output[-1:]  # the last token said was never run
    return logits


def difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
