"""Recorded trajectories as token ids: who said which of them. Owns the file formats that are accepted.

Turns are cut on the token ids of the whole text, so every prompt is a prefix of the same ids and nothing is tokenised
anew at a border. A token that straddles two segments belongs to the later one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from precache.agents.recorded import read_recorded
from precache.fidelity import FidelityError
from precache.tasks import TASKS, Trajectory, load_episodes, read_trajectories

_EPISODES = "_episodes.jsonl"
_SHOWN = 60

Encode = Callable[[str], list[int]]


class RecordedTurn(NamedTuple):
    """``role`` read the tokens before ``start`` and said those from ``start`` to ``end`` (exclusive)."""

    role: str
    start: int
    end: int


@dataclass(frozen=True)
class Recording:
    """One trajectory, ready to be said again."""

    trajectory_id: str
    token_ids: tuple[int, ...]
    turns: tuple[RecordedTurn, ...]

    def __post_init__(self) -> None:
        end = 1  # a role needs a prompt of at least one token
        for turn in self.turns:
            if not end <= turn.start < turn.end <= len(self.token_ids):
                raise FidelityError(
                    f"trajectory {self.trajectory_id!r}: turn {tuple(turn)}, expected turns in order, "
                    f"each of at least one token, within 1 to {len(self.token_ids)}"
                )
            end = turn.end
        if not self.turns:
            raise FidelityError(f"trajectory {self.trajectory_id!r}: no role said anything")

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that said something, in order of first appearance."""
        return tuple(dict.fromkeys(turn.role for turn in self.turns))

    @property
    def num_run(self) -> int:
        """Tokens that somebody has to run at least once: all but the last one said, and what follows it."""
        return self.turns[-1].end - 1

    def tokens_said(self) -> Counter[str]:
        """How many tokens each role said."""
        said: Counter[str] = Counter()
        for turn in self.turns:
            said[turn.role] += turn.end - turn.start
        return said


Progress = Callable[[Sequence[Recording]], Iterable[Recording]]
"""Yields the recordings as it is given them, such as a progress bar does."""


def record(trajectory: Trajectory, encode: Encode) -> Recording:
    """Cut a trajectory into turns of token ids. Raises FidelityError if no role says a whole token."""
    token_ids = encode(trajectory.text)
    turns = []
    end = 0
    for turn in trajectory.turns():
        start = max(1, end, _common_length(encode(turn.prompt), token_ids))
        end = max(end, _common_length(encode(turn.prompt + turn.target), token_ids))
        if start < end:
            turns.append(RecordedTurn(turn.role, start, end))
    return Recording(trajectory.question_id, tuple(token_ids), tuple(turns))


def check_recordings(
    recordings: Sequence[Recording], agents: Iterable[str], context_window: int
) -> None:
    """Raise FidelityError for recordings that these agents and this window cannot replay."""
    if not recordings:
        raise FidelityError("no trajectory to compare policies on")
    known = sorted(agents)
    for recording in recordings:
        if unknown := sorted(set(recording.roles) - set(known)):
            raise FidelityError(
                f"trajectory {recording.trajectory_id!r} has the roles {unknown}; adapters are "
                f"given for {known}"
            )
        if recording.turns[-1].end > context_window:
            raise FidelityError(
                f"trajectory {recording.trajectory_id!r} has {recording.turns[-1].end} tokens, the "
                f"context window is {context_window}"
            )


def read_any(path: Path, task: str) -> list[Trajectory]:
    """Read trajectories: our JSONL, an ``--out`` file of ``precache agents``, or recorded episodes.

    Recorded episodes are a file ``TASK_episodes.jsonl``, or a folder with the one of ``task``. Raises FidelityError,
    TrajectoryFormatError, ResultsFileError or TaskDataError, naming file and line.
    """
    if path.is_dir():
        return list(load_episodes(TASKS[task], path).trajectories)
    first = _first_row(path)
    if "segments" in first:
        return read_trajectories(path)
    if "settings" in first:
        return [item.trajectory for item in read_recorded(path, task)]
    named = path.name.removesuffix(_EPISODES)
    if "prompt" in first and named in TASKS and path.name.endswith(_EPISODES):
        return list(load_episodes(TASKS[named], path.parent).trajectories)
    raise FidelityError(
        f"{path}: an object with the keys {sorted(first)}; expected trajectories (question_id, segments), "
        f"a results file of precache agents, or {' or '.join(f'{name}{_EPISODES}' for name in TASKS)}"
    )


def _first_row(path: Path) -> dict[str, Any]:
    try:
        with path.open(encoding="utf-8") as file:
            line = next((line for line in file if line.strip()), "")
    except (OSError, UnicodeDecodeError) as error:
        raise FidelityError(f"trajectories: {path} cannot be read: {error}") from error
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise FidelityError(f"{path}: got {line[:_SHOWN]!r}, expected a JSON object a line")
    return row


def _common_length(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
