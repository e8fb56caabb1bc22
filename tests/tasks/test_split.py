"""Evaluation questions are never trained on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from precache.tasks import split_of

QUESTIONS = [f"What is number {n}?" for n in range(400)]


def test_about_fifteen_percent_are_held_out() -> None:
    heldout = sum(split_of(question) == "heldout" for question in QUESTIONS)

    assert 0.10 < heldout / len(QUESTIONS) < 0.20


@pytest.mark.parametrize(
    "variant",
    ["{}", "  {} ", "{}\nOptions:(A) yes (B) no", "{}\nOptions: (A) no (B) maybe", "{}?"],
)
def test_one_question_lies_on_one_side_however_it_is_written(variant: str) -> None:
    for question in QUESTIONS:
        assert split_of(variant.format(question).upper()) == split_of(question)


def test_different_questions_are_told_apart() -> None:
    assert {split_of(question) for question in QUESTIONS} == {"train", "heldout"}


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_split_does_not_depend_on_the_hash_seed(hash_seed: str) -> None:
    code = (
        "from precache.tasks import split_of\n"
        "print(*(split_of(f'What is number {n}?') for n in range(400)))"
    )
    environment = os.environ | {
        "PYTHONHASHSEED": hash_seed,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )

    assert result.stdout.split() == [split_of(question) for question in QUESTIONS]
