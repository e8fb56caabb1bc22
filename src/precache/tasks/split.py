"""Which questions may be trained on. Owns the one rule; it depends on the question's words only."""

from __future__ import annotations

import hashlib
import re
from typing import Literal

Split = Literal["train", "heldout"]

HELDOUT_PERCENT = 15


def split_of(question: str) -> Split:
    """Return the side on which a question lies: about 15 % are held out.

    Case, spacing, punctuation and the answer options do not count, so that one question asked
    twice never lies on both sides. Stable across processes, platforms and versions.
    """
    digest = hashlib.sha256(normalise_question(question).encode("utf-8")).digest()
    return "heldout" if int.from_bytes(digest[:8], "big") % 100 < HELDOUT_PERCENT else "train"


def normalise_question(question: str) -> str:
    """Return the question's words in lower case, without its options, joined by single spaces."""
    stem = re.split(r"\n\s*options:", question, maxsplit=1, flags=re.IGNORECASE)[0]
    return " ".join(re.findall(r"\w+", stem.casefold()))
