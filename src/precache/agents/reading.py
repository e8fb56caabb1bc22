"""What an agent wrote -> what it meant. Owns every kind of malformed output and its name.

As AutoAct does, prose after a call and a full stop are forgiven; what cannot be read is named, so
that it is counted and not guessed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

Malformed = Literal[
    "empty_text",  # nothing but white space
    "no_action",  # an empty call
    "unknown_action",  # a name that is no action of this task
    "misplaced_action",  # Reflect without a Finish before it
    "empty_argument",
    "unended",  # the token limit came before the stop string
    "repetition",  # the same words over and over until the token limit
    "unknown_choice",
]

_CALL = re.compile(r"\s*(\w+)\s*\[([^\]]*)\]?.*", re.DOTALL)
_REPEATED_TAIL = re.compile(r"(?P<unit>.{2,120}?)(?P=unit){2,}(?P<rest>.{0,120})\Z", re.DOTALL)


class Call(NamedTuple):
    """A tool and its argument, stripped."""

    tool: str
    argument: str


def read_tool(text: str, tools: Sequence[str]) -> str | None:
    """Return the tool that the text names, in any case of letters; None for any other text."""
    folded = {tool.casefold(): tool for tool in tools}
    return folded.get(text.strip().casefold())


def read_call(text: str, tools: Sequence[str]) -> Call | Malformed:
    """Return the first call of `Tool[argument]`, or what is wrong with the text."""
    if not text.strip():
        return "no_action"
    match = _CALL.fullmatch(text)
    tool = read_tool(match.group(1), tools) if match else None
    if match is None or tool is None:
        return "unknown_action"
    argument = match.group(2).strip()
    return Call(tool, argument) if argument else "empty_argument"


def read_choice(text: str, choices: Sequence[str]) -> str | None:
    """Return the choice with which the text begins, or None."""
    words = re.findall(r"\w+", text.casefold())
    folded = {choice.casefold(): choice for choice in choices}
    return folded.get(words[0]) if words else None


def drop_repetition(text: str) -> str | None:
    """Return the text up to the first of at least three equal pieces that it ends with.

    None if it does not end so. The last piece may be cut off, as the token limit does it.
    """
    match = _REPEATED_TAIL.search(text)
    if match is None or not match.group("unit").startswith(match.group("rest")):
        return None
    if not match.group("unit").strip():
        return text[: match.start()]
    return text[: match.start()] + match.group("unit")
