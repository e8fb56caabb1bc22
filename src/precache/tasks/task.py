"""A task: its instructions, its tools, and how an episode is written as one trajectory text.

Owns the text format that training, the fidelity check and the agents share. The roles:
`plan` writes thoughts and tool names, `action` writes the arguments, `reflect` judges an answer.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from precache.errors import PrecacheError
from precache.tasks.episodes import Episode, EpisodeParseError, Step, clip, parse_episode
from precache.tasks.trajectory import Segment, Trajectory

ROLES = ("plan", "action", "reflect")


class TaskDataError(PrecacheError):
    """A task's data file is missing or does not hold what it should."""


@dataclass(frozen=True, slots=True)
class Task:
    """One task's name, the instructions that open every trajectory, and its tool names."""

    name: str
    instructions: str
    tools: tuple[str, ...]

    def header(self, question: str, options: str | None = None) -> str:
        """Return the text that every trajectory on this question begins with."""
        lines = [self.instructions, f"Question: {question}"]
        if options is not None:
            lines.append(f"Options: {options}")
        return "\n".join(lines) + "\n"

    def trajectory(self, episode: Episode) -> Trajectory:
        """Write an episode as one text whose segments name their writers."""
        pieces = [Segment(None, self.header(episode.question, episode.options))]
        for number, step in enumerate(episode.steps, start=1):
            pieces += _step_segments(number, step)
        return Trajectory(episode.question, _merge_unwritten(pieces))


def thought_cue(number: int) -> str:
    """Return what precedes the thought of a step (from 1).

    Cues end without a space: the writer's first token brings it, as tokenizers like it.
    """
    return f"Thought {number}:"


def action_cue(number: int) -> str:
    """Return what precedes the call of a step; the planner writes ` Tool[`, the actor `arg]`."""
    return f"Action {number}:"


def observation_line(number: int, observation: str) -> str:
    """Return a tool's answer as the line that the roles read: clipped, on one line, ended."""
    return f"Observation {number}: {clip(observation)}\n"


@dataclass(frozen=True, slots=True)
class LoadedTrajectories:
    """What a file held: the readable trajectories, and the skipped episodes by reason."""

    trajectories: tuple[Trajectory, ...]
    skipped: dict[str, int]


def load_episodes(task: Task, data_dir: Path) -> LoadedTrajectories:
    """Read `{data_dir}/{task}_episodes.jsonl` and write each episode as a trajectory.

    Raises `TaskDataError` if the file is missing, a row is not an episode, or none is readable.
    """
    path = data_dir / f"{task.name}_episodes.jsonl"
    if not path.is_file():
        raise TaskDataError(f"data: {path} does not exist; expected the episodes of {task.name}")
    trajectories: list[Trajectory] = []
    skipped: Counter[str] = Counter()
    for number, line in enumerate(path.read_text(encoding="utf-8").rstrip("\n").split("\n"), 1):
        question, prompt = _read_row(path, number, line)
        try:
            trajectories.append(task.trajectory(parse_episode(question, prompt, task.tools)))
        except EpisodeParseError as error:
            skipped[str(error)] += 1
    if not trajectories:
        raise TaskDataError(f"data: {path} holds no readable episode; skipped {dict(skipped)}")
    return LoadedTrajectories(tuple(trajectories), dict(skipped))


def _read_row(path: Path, number: int, line: str) -> tuple[str, str]:
    try:
        row = json.loads(line)
        question, prompt = row["question"], row["prompt"]
    except (ValueError, KeyError, TypeError) as error:
        raise TaskDataError(
            f"data: {path}, line {number}: expected a JSON object with question and prompt, "
            f"got {line[:60]!r}"
        ) from error
    if not isinstance(question, str) or not isinstance(prompt, str):
        raise TaskDataError(f"data: {path}, line {number}: question and prompt must be strings")
    return question, prompt


def _step_segments(number: int, step: Step) -> list[Segment]:
    thinker = "reflect" if step.is_reflection else "plan"
    arguer = "reflect" if step.is_reflection else "action"
    pieces = [
        Segment(None, thought_cue(number)),
        Segment(thinker, f" {step.thought}\n"),
        Segment(None, action_cue(number)),
    ]
    if thinker == arguer:
        pieces.append(Segment(thinker, f" {step.tool}[{step.argument}]\n"))
    else:
        pieces += [Segment(thinker, f" {step.tool}["), Segment(arguer, f"{step.argument}]\n")]
    if step.observation is not None:
        pieces.append(Segment(None, observation_line(number, step.observation)))
    return pieces


def _merge_unwritten(pieces: list[Segment]) -> tuple[Segment, ...]:
    merged: list[Segment] = []
    for piece in pieces:
        if merged and piece.role is None and merged[-1].role is None:
            merged[-1] = Segment(None, merged[-1].text + piece.text)
        else:
            merged.append(piece)
    return tuple(merged)
