"""One trajectory, played by the engine and by the slow reference, turn by turn on the same tokens."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from precache import Engine, GenerationOutput
from precache.cache.trajectory import Trajectory
from tests.reference.policies import Caches, ReferenceState

FIRST_ID = 10  # above the special tokens
VOCAB = 120
TOLERANCE = 1e-4  # fp32 on a CPU
NOTICEABLE = 1e-2

SELECTIVE_METHODS = (
    ("droidspeak", None),
    ("droidspeak-scattered", None),
    ("cacheblend", None),
    ("relaycaching", None),
)
CONTROLS = (("random-layers", None), ("random-tokens", None))
SELECTIVE = tuple(policy for policy, _ in SELECTIVE_METHODS)
METHODS = (
    ("nonshared", None),
    ("fullshared", None),
    ("baseshared", None),
    ("prelrshared", None),
    ("rebaseshared", "lazy-prefill"),
    ("rebaseshared", "double-batch"),
    ("rebaseshared", "idle-lazy-prefill"),
    *SELECTIVE_METHODS,
)
SHARED_METHODS = METHODS[1:]
STRIP_METHODS = METHODS[2:7]
# Under the others a reader overwrites what is shared, so turns that overlap see each other's order.
UNCHANGING = tuple(method for method in METHODS if method not in SELECTIVE_METHODS)
IN_ORDER = tuple(method for method in METHODS if method[1] != "idle-lazy-prefill")
SCHEDULES = ("lazy-prefill", "double-batch", "idle-lazy-prefill")
# A method that is wrong in the place of another, and gives noticeably other logits.
WRONG = {
    "nonshared": "fullshared",
    "fullshared": "nonshared",
    "baseshared": "prelrshared",
    "prelrshared": "baseshared",
    "rebaseshared": "prelrshared",
    "baselrshared": "nonshared",
} | {policy: "fullshared" for policy, _ in (*SELECTIVE_METHODS, *CONTROLS)}


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
REUSED = [0, 21, 26, 36, 38, 43, 53]  # of the prompts of STEPS, where all agents share
REUSED_ALONE = [0, 0, 0, 21, 0, 26, 36]  # where every agent has its own cache


@dataclass
class Played:
    """What an engine made of a trajectory: per turn the logits of the output, and tokens reused."""

    logits: list[Tensor] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


def tokens(count: int, seed: int = 0) -> list[int]:
    """Ordinary token ids."""
    rng = random.Random(seed)
    return [rng.randrange(FIRST_ID, VOCAB) for _ in range(count)]


def other_than(token_id: int) -> int:
    return FIRST_ID if token_id != FIRST_ID else FIRST_ID + 1


def script(steps: Sequence[Step], seed: int = 0) -> list[tuple[str, list[int], list[int]]]:
    """(agent, new prompt tokens, output tokens) for every turn."""
    rng = random.Random(seed)

    def draw(count: int) -> list[int]:
        return [rng.randrange(FIRST_ID, VOCAB) for _ in range(count)]

    return [(step.agent, draw(step.prompt), draw(step.output)) for step in steps]


def reused(engine: Engine, agent: str, prompt: Sequence[int], output: Sequence[int]) -> int:
    """Score a turn for its effect on the cache and return how many tokens it reused."""
    before = engine.stats().reused_tokens
    engine.score(agent, prompt, output)
    return engine.stats().reused_tokens - before


def play_engine(engine: Engine, steps: Sequence[Step] = STEPS, seed: int = 0) -> Played:
    played = Played()
    for agent, prompt, output in script(steps, seed):
        played.token_ids += prompt
        before = engine.stats().reused_tokens
        played.logits.append(engine.score(agent, played.token_ids, output))
        played.cached.append(engine.stats().reused_tokens - before)
        played.token_ids += output
    return played


def play_reference(
    state: ReferenceState, steps: Sequence[Step] = STEPS, seed: int = 0
) -> list[Tensor]:
    logits, unprocessed = [], []
    for agent, prompt, output in script(steps, seed):
        new = [*unprocessed, *prompt, *output[:-1]]
        everything = turn(state, agent, new)
        logits.append(everything[-len(output) :])
        unprocessed = output[-1:]  # the last token said was never run
    return logits


def turn(state: ReferenceState, agent: str, new_tokens: Sequence[int]) -> Tensor:
    """A reference turn by the engine's name of the agent."""
    return state.turn(None if agent == "base" else agent, new_tokens)


def answer(
    state: ReferenceState, agent: str, prompt: Sequence[int], output: Sequence[int]
) -> Tensor:
    """The logits of ``output`` after a prompt that continues what the reference holds."""
    held = len(state.tokens)
    assert list(prompt[:held]) == state.tokens, "the prompt does not continue the reference"
    return turn(state, agent, [*prompt[held:], *output[:-1]])[-len(output) :]


def difference(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


def logprob_difference(output: GenerationOutput, logits: Tensor) -> float:
    """Largest difference between the reported top log-probabilities and those of ``logits``."""
    expected = torch.log_softmax(logits, dim=-1)
    return max(
        abs(value - float(row[token_id]))
        for row, item in zip(expected, output.logprobs, strict=True)
        for token_id, value in (*item.top, (item.token_id, item.logprob))
    )


def only_trajectory(engine: Engine) -> Trajectory:
    (trajectory,) = engine.store.trajectories
    return trajectory


def stored(engine: Engine, trajectory: Trajectory) -> dict[str, Tensor]:
    """Every valid cached number of a trajectory, by a name for it; strips by agent and covered range."""
    length = trajectory.length
    found = {}
    for layer, (k, v) in enumerate(zip(trajectory.base.k, trajectory.base.v, strict=True)):
        found[f"k.{layer}"], found[f"v.{layer}"] = k[:, :length], v[:, :length]
    for name, strip_rows in _strips(engine, trajectory):
        found[name] = strip_rows
    return {name: tensor.clone() for name, tensor in found.items()}


def _strips(engine: Engine, trajectory: Trajectory) -> Iterator[tuple[str, Tensor]]:
    for adapter in engine.bank:
        layout = engine.policy.strip_of(adapter, engine.bank)
        if layout is None or layout.key not in trajectory.strips:
            continue
        strip = trajectory.strips[layout.key]
        for kind, parts in (("v", strip.v), ("k", strip.k)):
            for layer, part in enumerate(parts):
                for low, high in strip.covered if part is not None else ():
                    yield f"{adapter.name}.{kind}.{layer}.{low}-{high}", part[low:high]  # type: ignore[index]


def stored_by_reference(caches: Caches) -> dict[str, Tensor]:
    """The same of the reference, whose strips cover a prefix."""
    found = {f"k.{layer}": k for layer, k in enumerate(caches.k)}
    found |= {f"v.{layer}": v for layer, v in enumerate(caches.v)}
    for kind, strips in (("v", caches.v_strips), ("k", caches.k_strips)):
        for name, parts in strips.items():
            for layer, part in enumerate(parts):
                if part is not None and len(part):
                    found[f"{name}.{kind}.{layer}.0-{len(part)}"] = part
    return found


def stored_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)
