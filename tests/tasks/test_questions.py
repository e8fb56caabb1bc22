"""Questions from files: both tasks' formats, a user's own, and the real files where they lie beside the project."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from precache.tasks import (
    QUESTION_FILES,
    TASKS,
    Passage,
    TaskDataError,
    load_episodes,
    load_plain_questions,
    split_of,
)
from precache.tasks.split import normalise_question

DATA = Path(__file__).parents[3] / "shared" / "data"
HOTPOT: dict[str, Any] = {
    "id": "h1",
    "question": "Who  wrote it?",
    "answer": " Ada ",
    "context": [
        {"title": "Ada", "sentences": ["Ada wrote it. ", " ", "She did."]},
        {"title": "Empty", "sentences": [" "]},
    ],
}
SCIENCE: dict[str, Any] = {
    "id": "s1",
    "question": "Which is\u2028hottest?",
    "choices": ["Ice", "Steam"],
    "answer": "B",
    "caption": "A kettle.",
    "ocr": "[([[1, 2]], 'hot  tea', 0.9), ([[3, 4]], '', 0.1)]",
}

needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"{DATA} is not there")


def write(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_hotpotqa_brings_its_paragraphs(tmp_path: Path) -> None:
    write(tmp_path / "hotpotqa" / "easy.jsonl", HOTPOT)
    (question,) = QUESTION_FILES["hotpotqa"].load(tmp_path, ["easy"])
    assert (question.text, question.answer, question.options) == ("Who wrote it?", "Ada", None)
    assert question.passages == (Passage("Ada", ("Ada wrote it.", "She did.")),)


def test_scienceqa_brings_choices_and_the_image_in_words(tmp_path: Path) -> None:
    plain = {**SCIENCE, "id": "s2", "caption": "no img", "ocr": "no img"}
    write(tmp_path / "grade1-4.jsonl", SCIENCE, plain)
    seen, unseen = QUESTION_FILES["scienceqa"].load(tmp_path, ["1-4"])
    assert (seen.text, seen.options) == ("Which is hottest?", "(A) Ice (B) Steam")
    assert seen.image_text == "Image caption: A kettle. OCR result: hot tea"
    assert unseen.image_text is None


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "line 2: expected a question of scienceqa, got '{'"),
        ({"id": "x"}, "line 2: .*KeyError: 'choices'"),
        ({**SCIENCE, "answer": "C"}, "line 2: .*answer is 'C', expected a letter of the 2 choices"),
    ],
)
def test_a_wrong_row_is_named(row: Any, message: str, tmp_path: Path) -> None:
    write(tmp_path / "grade1-4.jsonl", SCIENCE, row)
    with pytest.raises(TaskDataError, match=message):
        QUESTION_FILES["scienceqa"].load(tmp_path, ["1-4"])


def test_levels_and_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    files = QUESTION_FILES["hotpotqa"]
    with pytest.raises(TaskDataError, match=r"got \['odd'\], allowed are easy, medium, hard"):
        files.load(tmp_path, ["odd"])
    with pytest.raises(TaskDataError, match=r"neither .*hotpotqa/easy\.jsonl nor .*easy\.jsonl"):
        files.load(tmp_path, ["easy"])


def test_a_users_own_questions(tmp_path: Path) -> None:
    chosen = {"id": 2, "question": "Hot?", "choices": ["Ice", "Steam"], "answer": "B"}
    path = write(tmp_path / "q.jsonl", {"id": 1, "question": "Why  so?"}, "", chosen)
    free, choice = load_plain_questions(path)
    assert (free.question_id, free.level, free.text, free.answer) == ("1", "all", "Why so?", "")
    assert (choice.options, choice.answer) == ("(A) Ice (B) Steam", "B")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"id": 1}, "line 2: expected an object with id and question"),
        ("[]", "line 2: expected an object"),
        ({"id": 1, "question": "Q", "answer": 3}, "line 2: expected an object"),
        (
            {"id": 1, "question": "Q", "choices": ["x", "y"], "answer": "x"},
            r"line 2: answer: got 'x', expected one of \['A', 'B'\]",
        ),
        ({"id": 0, "question": "Q"}, "line 2: the id '0' is there already"),
    ],
)
def test_what_is_wrong_with_a_users_question_is_said(
    row: Any, message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "q.jsonl", {"id": 0, "question": "Q"}, row)
    with pytest.raises(TaskDataError, match=message):
        load_plain_questions(path)


def test_no_question_at_all_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TaskDataError, match="holds no question"):
        load_plain_questions(write(tmp_path / "q.jsonl", ""))
    with pytest.raises(TaskDataError, match="is no file"):
        load_plain_questions(tmp_path)


# -- the real files ------------------------------------------------------------------------------


@needs_data
@pytest.mark.parametrize(("task", "per_level"), [("hotpotqa", 100), ("scienceqa", 120)])
def test_the_benchmark_files_are_read_whole(task: str, per_level: int) -> None:
    files = QUESTION_FILES[task]
    questions = files.load(DATA, files.levels)
    assert [sum(q.level == x for q in questions) for x in files.levels] == [per_level] * 3
    assert len({question.question_id for question in questions}) == len(questions)
    assert all(question.text and question.answer for question in questions)
    if task == "hotpotqa":
        assert all(len(question.passages) >= 2 for question in questions)
    else:
        assert 0 < sum(question.image_text is not None for question in questions) < len(questions)


@needs_data
@pytest.mark.parametrize("task", ["hotpotqa", "scienceqa"])
def test_no_benchmark_question_was_trained_on(task: str) -> None:
    loaded = load_episodes(TASKS[task], DATA / "role_trajectories").trajectories
    trained = {normalise_question(t.question_id) for t in loaded if _is_trained(t.question_id)}
    files = QUESTION_FILES[task]
    asked = {normalise_question(q.text) for q in files.load(DATA, files.levels)}
    assert len(trained) > 50
    assert trained & asked == set()


def _is_trained(question: str) -> bool:
    return split_of(question) == "train"
