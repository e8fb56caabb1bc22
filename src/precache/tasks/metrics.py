"""How an answer is judged: HotpotQA's exact match and F1, ScienceQA's choice.

Normalisation and the yes/no rule are those of HotpotQA's evaluation script; the choice of an
unlettered answer is AutoAct's (the option that shares the most words).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

from precache.tasks.questions import Question

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_LETTER = re.compile(r"\(?([A-Za-z])\)?[.:]?(\s.*)?", re.DOTALL)
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED_ANSWERS = ("yes", "no", "noanswer")


def score_answer(question: Question, answer: str | None) -> dict[str, float]:
    """Return `em`, `f1` and `reward` of a free answer, `accuracy` and `reward` of a choice.

    Rewards are AutoAct's: F1, or whether the choice is right. No answer scores nothing; a
    question without a known answer has no scores.
    """
    if not question.answer:
        return {}
    if question.choices:
        right = float(chosen_letter(answer or "", question.choices) == question.answer)
        return {"accuracy": right, "reward": right}
    given = f1(answer or "", question.answer)
    return {"em": float(exact_match(answer or "", question.answer)), "f1": given, "reward": given}


def normalise_answer(text: str) -> str:
    """Return text in lower case without ASCII punctuation, articles and double spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, answer: str) -> bool:
    """Return whether the normalised texts are equal."""
    return normalise_answer(prediction) == normalise_answer(answer)


def f1(prediction: str, answer: str) -> float:
    """Return the F1 of the normalised words; yes, no and noanswer count only when they are equal."""
    ours, gold = normalise_answer(prediction), normalise_answer(answer)
    if ours != gold and (ours in _CLOSED_ANSWERS or gold in _CLOSED_ANSWERS):
        return 0.0
    num_same = sum((Counter(ours.split()) & Counter(gold.split())).values())
    if num_same == 0:
        return 0.0
    precision = num_same / len(ours.split())
    recall = num_same / len(gold.split())
    return 2 * precision * recall / (precision + recall)


def chosen_letter(prediction: str, choices: Sequence[str]) -> str | None:
    """Return the letter of the choice that an answer means, None for an empty answer.

    A letter alone or in front of its text counts as itself, a choice's own text as that choice.
    Anything else is the choice that shares the largest part of its words (AutoAct's rule), the
    first of equals.
    """
    text = prediction.strip()
    if not text:
        return None
    folded = [choice.strip().casefold() for choice in choices]
    if text.casefold() in folded:
        return _letter(folded.index(text.casefold()))
    match = _LETTER.fullmatch(text)
    if match and _is_lettered(match, folded):
        return match.group(1).upper()
    scores = [_overlap(text.casefold(), choice) for choice in folded]
    return _letter(scores.index(max(scores)))


def _is_lettered(match: re.Match[str], choices: Sequence[str]) -> bool:
    """Whether the letter exists, and is not just the first word of a sentence (`A telescope`)."""
    index, rest = ord(match.group(1).upper()) - ord("A"), (match.group(2) or "").strip()
    if not 0 <= index < len(choices):
        return False
    return not rest or match.group(0)[0] == "(" or rest.casefold() == choices[index]


def _letter(index: int) -> str:
    return chr(ord("A") + index)


def _overlap(a: str, b: str) -> float:
    ours, theirs = set(a.split()), set(b.split())
    return len(ours & theirs) / max(len(ours), len(theirs), 1)
