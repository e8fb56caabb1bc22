"""Tasks and the trajectories of agents that work on them. Plain data: no torch, no tokenizer."""

from __future__ import annotations

from precache.tasks.episodes import Episode, EpisodeParseError, Step, parse_episode
from precache.tasks.hotpotqa import HOTPOTQA, HOTPOTQA_FILES
from precache.tasks.questions import Passage, Question, QuestionFiles, load_plain_questions
from precache.tasks.scienceqa import SCIENCEQA, SCIENCEQA_FILES
from precache.tasks.split import Split, split_of
from precache.tasks.task import (
    ROLES,
    LoadedTrajectories,
    Task,
    TaskDataError,
    action_cue,
    load_episodes,
    observation_line,
    thought_cue,
)
from precache.tasks.trajectory import (
    Segment,
    Span,
    Trajectory,
    TrajectoryFormatError,
    Turn,
    read_trajectories,
    write_trajectories,
)

TASKS = {task.name: task for task in (SCIENCEQA, HOTPOTQA)}
QUESTION_FILES = {"scienceqa": SCIENCEQA_FILES, "hotpotqa": HOTPOTQA_FILES}

__all__ = [
    "HOTPOTQA",
    "QUESTION_FILES",
    "ROLES",
    "SCIENCEQA",
    "TASKS",
    "Episode",
    "EpisodeParseError",
    "LoadedTrajectories",
    "Passage",
    "Question",
    "QuestionFiles",
    "Segment",
    "Span",
    "Split",
    "Step",
    "Task",
    "TaskDataError",
    "Trajectory",
    "TrajectoryFormatError",
    "Turn",
    "action_cue",
    "load_episodes",
    "load_plain_questions",
    "observation_line",
    "parse_episode",
    "read_trajectories",
    "split_of",
    "thought_cue",
    "write_trajectories",
]
