"""HotpotQA: questions that need facts from several pages; the answer is free text."""

from __future__ import annotations

from typing import Any

from precache.tasks.questions import Passage, Question, QuestionFiles, one_line
from precache.tasks.task import Task

HOTPOTQA = Task(
    name="hotpotqa",
    instructions=(
        "Answer the question in steps of Thought, Action and Observation. "
        "Actions: Search[query] searches the web, Retrieve[entity] reads an encyclopedia page, "
        "Lookup[keyword] finds the next sentence with the keyword in the last page, "
        "Finish[answer] gives the answer (yes or no where it is asked), "
        "Reflect[right] or Reflect[wrong] judges it and must follow Finish."
    ),
    tools=("Search", "Retrieve", "Lookup", "Finish", "Reflect"),
)


def read_question(level: str, row: dict[str, Any]) -> Question:
    """Return the question of one row; its ten paragraphs become passages."""
    passages = (
        Passage(page["title"], tuple(s.strip() for s in page["sentences"] if s.strip()))
        for page in row["context"]
    )
    return Question(
        question_id=row["id"],
        level=level,
        text=one_line(row["question"]),
        answer=one_line(row["answer"]),
        passages=tuple(passage for passage in passages if passage.sentences),
    )


HOTPOTQA_FILES = QuestionFiles("hotpotqa", "", ("easy", "medium", "hard"), read_question)
