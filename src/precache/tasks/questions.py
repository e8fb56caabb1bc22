"""The questions that agents are judged on, and the files they come from.

Owns `Question`, `Passage` and reading one JSON object a line. What a task's rows mean is the
task's own (`hotpotqa.py`, `scienceqa.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from precache.tasks.task import TaskDataError


@dataclass(frozen=True, slots=True)
class Passage:
    """One titled paragraph of the local corpus, as sentences."""

    title: str
    sentences: tuple[str, ...]

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.sentences).split())


@dataclass(frozen=True, slots=True)
class Question:
    """One question, its answer, and what its tools may know.

    `choices` is empty for a free answer; `image_text` is None where there is no image.
    """

    question_id: str
    level: str
    text: str
    answer: str
    choices: tuple[str, ...] = ()
    passages: tuple[Passage, ...] = ()
    image_text: str | None = None

    @property
    def options(self) -> str | None:
        """The choices on one line, lettered; None for a free answer."""
        if not self.choices:
            return None
        pairs = zip(letters_of(self.choices), self.choices, strict=True)
        return " ".join(f"({letter}) {choice}" for letter, choice in pairs)


ReadRow = Callable[[str, dict[str, Any]], Question]


@dataclass(frozen=True, slots=True)
class QuestionFiles:
    """A task's files: `{folder}/{prefix}{level}.jsonl` for each of `levels`."""

    folder: str
    prefix: str
    levels: tuple[str, ...]
    read_row: ReadRow

    def load(self, data_dir: Path, levels: Sequence[str]) -> list[Question]:
        """Read the questions of `levels`, in file order.

        `data_dir` is the folder of the task, or the one above it. Raises TaskDataError naming the
        level, or the file and line.
        """
        unknown = [level for level in levels if level not in self.levels]
        if unknown or not levels:
            raise TaskDataError(
                f"levels: got {list(levels)}, allowed are {', '.join(self.levels)}, each once"
            )
        return [question for level in levels for question in self._load_level(data_dir, level)]

    def path(self, data_dir: Path, level: str) -> Path:
        """Return where a level's file is; the nested folder is preferred."""
        name = f"{self.prefix}{level}.jsonl"
        nested = data_dir / self.folder / name
        return nested if nested.is_file() else data_dir / name

    def _load_level(self, data_dir: Path, level: str) -> Iterator[Question]:
        path = self.path(data_dir, level)
        if not path.is_file():
            raise TaskDataError(
                f"data: neither {data_dir / self.folder / path.name} nor {data_dir / path.name} "
                f"exists; expected the questions of level {level}"
            )
        for number, line in _lines(path):
            try:
                yield self.read_row(level, json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise TaskDataError(
                    f"data: {path}, line {number}: expected a question of {self.folder}, "
                    f"got {line[:60]!r} ({type(error).__name__}: {error})"
                ) from error


def load_plain_questions(path: Path) -> list[Question]:
    """Read a user's own questions: `{"id": ..., "question": ...}` a line; `answer` and `choices` where they are known.

    With choices the answer is a letter. Raises TaskDataError naming the file and the line.
    """
    if not path.is_file():
        raise TaskDataError(f"data: {path} is no file; expected a JSONL file of questions")
    questions: dict[str, Question] = {}
    for number, line in _lines(path):
        question = _plain_question(path, number, line)
        if question.question_id in questions:
            raise TaskDataError(
                f"data: {path}, line {number}: the id {question.question_id!r} is there already"
            )
        questions[question.question_id] = question
    if not questions:
        raise TaskDataError(f"data: {path} holds no question")
    return list(questions.values())


def _plain_question(path: Path, number: int, line: str) -> Question:
    try:
        row = json.loads(line)
        choices = tuple(one_line(choice) for choice in row.get("choices", ()))
        question = Question(
            question_id=str(row["id"]),
            level="all",
            text=one_line(row["question"]),
            answer=one_line(row.get("answer", "")),
            choices=choices,
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TaskDataError(
            f"data: {path}, line {number}: expected an object with id and question (text), and "
            f"answer (text) and choices (a list) where they are known; got {line[:60]!r}"
        ) from error
    if question.answer and choices and question.answer not in letters_of(choices):
        raise TaskDataError(
            f"data: {path}, line {number}: answer: got {question.answer!r}, expected one of "
            f"{letters_of(choices)}, the letter of a choice"
        )
    return question


def letters_of(choices: Sequence[str]) -> list[str]:
    """Return A, B, ... for as many choices as there are."""
    return [chr(ord("A") + index) for index in range(len(choices))]


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines that hold something. Other line separators may be part of a text."""
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if line.strip():
            yield number, line


def one_line(text: str) -> str:
    """Return text with every run of white space as one space."""
    return " ".join(text.split())
