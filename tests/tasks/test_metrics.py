"""Scores on cases worked out by hand from the official scripts' rules."""

from __future__ import annotations

import pytest

from precache.tasks import Question
from precache.tasks.metrics import chosen_letter, exact_match, f1, normalise_answer, score_answer


def test_normalisation_is_the_official_one() -> None:
    assert normalise_answer("The  Beatles' (an) Album!") == "beatles album"
    assert normalise_answer("U.S.A.") == "usa"
    assert normalise_answer("theatre") == "theatre"


@pytest.mark.parametrize(
    ("prediction", "answer", "em", "score"),
    [
        ("The Eiffel Tower", "eiffel tower", True, 1.0),
        ("Eiffel Tower in Paris", "Eiffel Tower", False, 2 * 0.5 * 1 / 1.5),
        ("Tower Tower", "Tower", False, 2 * 0.5 * 1 / 1.5),
        ("yes", "no", False, 0.0),
        ("yes it is", "yes", False, 0.0),
        ("noanswer", "no answer", False, 0.0),
        ("", "Paris", False, 0.0),
        ("Rome", "Paris", False, 0.0),
    ],
)
def test_exact_match_and_f1(prediction: str, answer: str, em: bool, score: float) -> None:
    assert exact_match(prediction, answer) is em
    assert f1(prediction, answer) == pytest.approx(score)


@pytest.mark.parametrize(
    ("prediction", "letter"),
    [
        ("B", "B"),
        ("(b)", "B"),
        ("(B) A telescope", "B"),
        ("a telescope", "B"),
        ("A telescope", "B"),
        ("use a telescope", "B"),
        ("E", "A"),
        ("", None),
    ],
)
def test_chosen_letter(prediction: str, letter: str | None) -> None:
    assert chosen_letter(prediction, ["A meter stick", "A telescope", "A clock"]) == letter


def test_rewards_are_f1_and_accuracy() -> None:
    free = Question("1", "easy", "?", "red fox")
    assert score_answer(free, "a red dog") == {"em": 0.0, "f1": 0.5, "reward": 0.5}
    choice = Question("2", "1-4", "?", "B", choices=("x", "y"))
    assert score_answer(choice, "B") == {"accuracy": 1.0, "reward": 1.0}
    assert score_answer(choice, None) == {"accuracy": 0.0, "reward": 0.0}
    assert score_answer(Question("3", "all", "?", ""), "x") == {}
