"""What one agent run looks like as text: who wrote which part.

Owns `Trajectory` and `Segment` and our own JSONL format for them. Knows no task and no tokenizer.
Every role's prompt is literally a prefix of the one trajectory text, so roles can share a cache.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from precache.errors import PrecacheError


class TrajectoryFormatError(PrecacheError):
    """A trajectory, or the file that holds it, is not in the format that we read."""


class Span(NamedTuple):
    """Half-open range of characters in a trajectory's text."""

    start: int
    end: int


class Turn(NamedTuple):
    """One role's turn: it reads `prompt` (a prefix of the text) and writes `target`."""

    role: str
    prompt: str
    target: str


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of text and the role that wrote it; `role` is None for the user, a tool or a cue."""

    role: str | None
    text: str

    def __post_init__(self) -> None:
        if not self.text:
            raise TrajectoryFormatError("segment text is empty; expected at least one character")
        if self.role == "":
            raise TrajectoryFormatError("segment role is ''; expected a role name or null")


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One question and everything that was said about it, in order.

    `question_id` decides the split (see `precache.tasks.split`): equal ids are one question.
    """

    question_id: str
    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        if not self.segments:
            raise TrajectoryFormatError(f"trajectory {self.question_id!r} has no segments")
        if self.segments[0].role is not None:
            raise TrajectoryFormatError(
                f"trajectory {self.question_id!r} begins with role {self.segments[0].role!r}; "
                "expected a first segment with role null: a role needs a prompt to answer"
            )

    @property
    def text(self) -> str:
        """The one text that every role reads."""
        return "".join(segment.text for segment in self.segments)

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that wrote something, in order of first appearance."""
        return tuple(dict.fromkeys(s.role for s in self.segments if s.role is not None))

    def spans(self, role: str) -> list[Span]:
        """Return the character ranges of `text` that `role` wrote, one per segment."""
        return [span for writer, span in self._ranges() if writer == role]

    def turns(self, role: str | None = None) -> list[Turn]:
        """Return the turns of `role` (of every role if None), in order."""
        text = self.text
        return [
            Turn(writer, text[: span.start], text[span.start : span.end])
            for writer, span in self._ranges()
            if writer is not None and role in (None, writer)
        ]

    def _ranges(self) -> Iterator[tuple[str | None, Span]]:
        start = 0
        for segment in self.segments:
            end = start + len(segment.text)
            yield segment.role, Span(start, end)
            start = end


def read_trajectories(path: Path) -> list[Trajectory]:
    """Read our own format: one JSON object a line.

    `{"question_id": "q1", "segments": [{"role": null, "text": "..."}, {"role": "plan", ...}]}`

    Raises `TrajectoryFormatError` naming the file and the line.
    """
    trajectories = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            trajectories.append(_from_json(json.loads(line)))
        except (ValueError, TrajectoryFormatError) as error:
            raise TrajectoryFormatError(f"{path}, line {number}: {error}") from error
    return trajectories


def write_trajectories(path: Path, trajectories: list[Trajectory]) -> None:
    """Write trajectories in the format that `read_trajectories` reads."""
    lines = [json.dumps(_to_json(trajectory), ensure_ascii=False) for trajectory in trajectories]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def _to_json(trajectory: Trajectory) -> dict[str, Any]:
    segments = [{"role": segment.role, "text": segment.text} for segment in trajectory.segments]
    return {"question_id": trajectory.question_id, "segments": segments}


def _from_json(row: Any) -> Trajectory:
    _require_keys(row, {"question_id": (str,), "segments": (list,)})
    for segment in row["segments"]:
        _require_keys(segment, {"role": (str, type(None)), "text": (str,)})
    segments = tuple(Segment(s["role"], s["text"]) for s in row["segments"])
    return Trajectory(row["question_id"], segments)


def _require_keys(row: Any, kinds: dict[str, tuple[type, ...]]) -> None:
    if not isinstance(row, dict) or set(row) != set(kinds):
        got = sorted(row) if isinstance(row, dict) else type(row).__name__
        raise TrajectoryFormatError(f"got {got}; expected an object with the keys {sorted(kinds)}")
    for key, allowed in kinds.items():
        if not isinstance(row[key], allowed):
            names = " or ".join("null" if k is type(None) else k.__name__ for k in allowed)
            raise TrajectoryFormatError(f"{key} is {row[key]!r}; expected {names}")
