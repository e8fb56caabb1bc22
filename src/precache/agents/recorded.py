"""Recorded episodes for forced mode: a results file of ours, or a folder of the source's runs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from precache.agents.results import ResultsFileError, read_results
from precache.agents.runner import Recorded
from precache.tasks import TASKS, load_episodes, split_of
from precache.tasks.trajectory import Segment, Trajectory

RECORDED_LEVEL = "heldout"


def read_recorded(path: Path, task_name: str) -> list[Recorded]:
    """Return the episodes to replay.

    Of a results file with several policies: those of the policy that comes first in it. Of a folder of the source's
    episodes: the held-out ones, which `precache train` never saw. Raises ResultsFileError, TaskDataError for a folder.
    """
    if path.is_dir():
        return _from_source(path, task_name)
    natural = [result for result in read_results(path) if result.key.mode == "natural"]
    if not natural:
        raise ResultsFileError(f"{path} holds no episode that was played in natural mode")
    first = natural[0].key.policy
    return [
        Recorded(
            result.key.level,
            result.key.repeat,
            _trajectory(result.key.question_id, result.episode["segments"]),
        )
        for result in natural
        if result.key.policy == first
    ]


def _trajectory(question_id: str, segments: list[dict[str, str | None]]) -> Trajectory:
    return Trajectory(
        question_id, tuple(Segment(item["role"], item["text"] or "") for item in segments)
    )


def _from_source(folder: Path, task_name: str) -> list[Recorded]:
    if task_name not in TASKS:
        raise ResultsFileError(
            f"{folder}: recorded runs are read for {sorted(TASKS)}, not for {task_name!r}"
        )
    seen: Counter[str] = Counter()
    recorded = []
    trajectories = load_episodes(TASKS[task_name], folder).trajectories
    for trajectory in (t for t in trajectories if split_of(t.question_id) == "heldout"):
        recorded.append(Recorded(RECORDED_LEVEL, seen[trajectory.question_id], trajectory))
        seen[trajectory.question_id] += 1
    return recorded
