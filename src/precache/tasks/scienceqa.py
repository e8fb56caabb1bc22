"""ScienceQA: multiple-choice science questions, with tools for images and for search."""

from __future__ import annotations

import ast
from typing import Any

from precache.tasks.questions import Question, QuestionFiles, letters_of, one_line
from precache.tasks.task import Task

SCIENCEQA = Task(
    name="scienceqa",
    instructions=(
        "Answer the multiple-choice science question in steps of Thought, Action and Observation. "
        "Actions: Image2Text[image] describes the image, Search[query] searches the web, "
        "Retrieve[entity] reads an encyclopedia page, Finish[letter] gives the answer, "
        "Reflect[right] or Reflect[wrong] judges it and must follow Finish."
    ),
    tools=("Image2Text", "Search", "Retrieve", "Finish", "Reflect"),
)

NO_IMAGE = "no img"


def read_question(level: str, row: dict[str, Any]) -> Question:
    """Return the question of one row. Raises ValueError if the answer is none of the choices."""
    choices = tuple(one_line(choice) for choice in row["choices"])
    answer = row["answer"]
    if answer not in letters_of(choices):
        raise ValueError(f"answer is {answer!r}, expected a letter of the {len(choices)} choices")
    return Question(
        question_id=row["id"],
        level=level,
        text=one_line(row["question"]),
        answer=answer,
        choices=choices,
        image_text=_image_text(row["caption"], row["ocr"]),
    )


def _image_text(caption: str, ocr: str) -> str | None:
    """Return caption and recognised words in the form in which the roles were trained."""
    if NO_IMAGE in (caption, ocr):
        return None
    return f"Image caption: {caption} OCR result: {_ocr_words(ocr)}"


def _ocr_words(ocr: str) -> str:
    """Return the words of a recogniser's result, a list of (box, word, confidence) as text."""
    words = [one_line(str(found[1])) for found in ast.literal_eval(ocr)]
    return ",".join(word for word in words if word) or "nothing"


SCIENCEQA_FILES = QuestionFiles("scienceqa", "grade", ("1-4", "5-8", "9-12"), read_question)
