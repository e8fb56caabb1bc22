"""Runs a workflow over questions, policies and repeats, and writes each episode to the results file.

Owns what is skipped on resume, the seeds, and the scores. Does not own where turns come from.
"""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from precache.agents.client import CompletionClient, TurnRefusedError
from precache.agents.corpus import Corpus
from precache.agents.forced import ForcedTurn, replay
from precache.agents.loop import Episode, PlayOptions
from precache.agents.record import EpisodeRecord
from precache.agents.results import EpisodeKey, EpisodeResult, ResultsFile
from precache.agents.tools import Tool, Toolbox
from precache.agents.workflow import Workflow
from precache.tasks.metrics import score_answer
from precache.tasks.questions import Question
from precache.tasks.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Recorded:
    """An episode to replay."""

    level: str
    repeat: int
    trajectory: Trajectory


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What all episodes of a run have in common."""

    repeats: int = 1
    seed: int = 0
    temperature: float = 0.0
    tool_timeout_s: float = 30.0


def run_natural(
    workflow: Workflow,
    client: CompletionClient,
    policy: str,
    questions: Sequence[Question],
    results: ResultsFile,
    options: RunOptions,
    *,
    corpus: Corpus | None = None,
    search: Tool | None = None,
) -> Iterator[EpisodeResult]:
    """Play every question `repeats` times and yield each result, those of an earlier run too.

    Raises EndpointError; what is finished is on disk then.
    """
    for repeat in range(options.repeats):
        for question in questions:
            key = EpisodeKey(policy, "natural", question.level, question.question_id, repeat)
            if key not in results.done:
                tools = Toolbox(question, corpus, search).tools()
                play = PlayOptions(
                    options.temperature, _seed(options.seed, key), options.tool_timeout_s
                )
                episode = Episode(workflow, client, key.question_id, _fields(question), tools, play)
                results.append(_play(episode, client, question, key))
            yield results.done[key]


def run_forced(
    workflow: Workflow,
    client: CompletionClient,
    policy: str,
    recorded: Iterable[Recorded],
    results: ResultsFile,
) -> Iterator[EpisodeResult]:
    """Replay every recorded episode and yield the totals of each, by role. Raises EndpointError."""
    for item in recorded:
        question_id = item.trajectory.question_id
        key = EpisodeKey(policy, "forced", item.level, question_id, item.repeat)
        if key not in results.done:
            started = time.perf_counter()
            client.begin_episode()
            totals = _replay(client, workflow, item.trajectory)
            results.append(EpisodeResult(key, time.perf_counter() - started, totals))
        yield results.done[key]


def _play(
    episode: Episode, client: CompletionClient, question: Question, key: EpisodeKey
) -> EpisodeResult:
    started = time.perf_counter()
    client.begin_episode()
    for _ in episode.play():
        pass
    seconds = time.perf_counter() - started
    episode.record.scores = _scores(question, episode.record)
    return EpisodeResult(key, seconds, {"text": episode.text, **episode.record.as_dict()})


def _scores(question: Question, record: EpisodeRecord) -> dict[str, float]:
    """The answer's scores; success is a right answer that the reflect role accepted."""
    scores = score_answer(question, record.answer)
    if scores:
        right = scores.get("em", scores.get("accuracy")) == 1.0
        scores["success"] = float(right and record.outcome == "accepted")
    return scores


def _replay(client: CompletionClient, workflow: Workflow, trajectory: Trajectory) -> dict[str, Any]:
    by_role: dict[str, list[ForcedTurn]] = defaultdict(list)
    try:
        for turn in replay(client, workflow, trajectory):
            by_role[turn.role].append(turn)
    except TurnRefusedError as error:
        return {"error": str(error), "roles": {}}
    return {"error": None, "roles": {role: _totals(turns) for role, turns in by_role.items()}}


def _totals(turns: Sequence[ForcedTurn]) -> dict[str, float]:
    answers = [turn for turn in turns if turn.is_answer]
    return {
        "turns": len(turns),
        "turns_kept": sum(turn.output.kept for turn in turns),
        "answers": len(answers),
        "answers_kept": sum(turn.output.kept for turn in answers),
        "tokens": sum(turn.output.tokens or 0 for turn in turns),
        "top1": sum(turn.output.top1 or 0 for turn in turns),
        "nll": sum(turn.output.nll or 0.0 for turn in turns),
        "seconds": sum(turn.output.seconds for turn in turns),
    }


def _fields(question: Question) -> dict[str, str]:
    return {"question": question.text, "options": question.options or ""}


def _seed(seed: int, key: EpisodeKey) -> int:
    """A seed of the episode's own: the same for every policy, another for every repeat."""
    text = f"{seed}/{key.repeat}/{key.question_id}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:3], "big") * 1000
