"""Teacher-forced replay: every policy says the recorded text, and its logits are compared with nonshared's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from torch import Tensor

from precache import Engine
from precache.fidelity.cost import Cost, CostMeter
from precache.fidelity.recordings import Progress, RecordedTurn, Recording, check_recordings
from precache.fidelity.scores import Score, score

EXACT = "nonshared"

Scores = Mapping[str, Score]  # by role


@dataclass(frozen=True)
class PolicyRun:
    """One policy on all recordings, in their order."""

    scores: tuple[Scores, ...]
    costs: tuple[Cost, ...]


@dataclass(frozen=True)
class Comparison:
    """Every policy on the same recordings; ``nonshared`` is always among them, and comes first."""

    recordings: tuple[Recording, ...]
    runs: Mapping[str, PolicyRun]
    num_layers: int

    @property
    def roles(self) -> tuple[str, ...]:
        """The reading roles, in order of first appearance."""
        return tuple(dict.fromkeys(role for item in self.recordings for role in item.roles))


def compare(
    engine: Engine,
    recordings: Sequence[Recording],
    policies: Sequence[str],
    progress: Progress = iter,
) -> Comparison:
    """Replay the recordings under ``nonshared`` and each of the policies; the engine gives model and adapters.

    Raises FidelityError for recordings that cannot be replayed, UnknownPolicyError and PolicyNotAllowedError, all
    before anything runs.
    """
    check_recordings(recordings, engine.agents(), engine.context_window)
    names = tuple(dict.fromkeys((EXACT, *policies)))
    found: dict[str, list[tuple[Scores, Cost]]] = {name: [] for name in names}
    with ExitStack() as stack:
        engines = {name: stack.enter_context(engine.with_policy(name)) for name in names}
        for recording in progress(recordings):
            exact: list[Tensor] = []
            for name in names:
                found[name].append(_measure(engines[name], recording, exact))
    runs = {
        name: PolicyRun(tuple(s for s, _ in pairs), tuple(c for _, c in pairs))
        for name, pairs in found.items()
    }
    return Comparison(tuple(recordings), runs, engine.model.shape.num_layers)


def replay(engine: Engine, recording: Recording) -> Iterator[tuple[RecordedTurn, Tensor]]:
    """Say a recording on an empty cache; yield each turn and its logits [tokens said, vocab], fp32."""
    engine.reset()
    token_ids = recording.token_ids
    for turn in recording.turns:
        prompt, said = token_ids[: turn.start], token_ids[turn.start : turn.end]
        yield turn, engine.score(turn.role, list(prompt), list(said))


def _measure(engine: Engine, recording: Recording, exact: list[Tensor]) -> tuple[Scores, Cost]:
    """Replay under one policy. The first engine of a recording fills ``exact``; the others are held against it."""
    scores: dict[str, Score] = {}
    with CostMeter(engine) as meter:
        for number, (turn, logits) in enumerate(replay(engine, recording)):
            if number == len(exact):
                exact.append(logits)
            said = recording.token_ids[turn.start : turn.end]
            found = score(exact[number], logits, said)
            scores[turn.role] = scores.get(turn.role, Score()) + found
        cost = meter.cost()
    engine.reset()
    return scores, cost
