"""One output of a turn -> what it meant, by what the turn `writes`. Nothing is carried out here."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from precache.agents.client import TurnOutput
from precache.agents.reading import (
    Call,
    Malformed,
    drop_repetition,
    read_call,
    read_choice,
    read_tool,
)
from precache.agents.workflow import INVALID, OTHERWISE, TurnSpec, Workflow, Writes


class Reading(NamedTuple):
    """What an output meant, and what of it goes into the text.

    `choice` is the key of the turn's `next`; `tool` was chosen and waits for its argument.
    """

    written: str
    malformed: tuple[Malformed, ...] = ()
    choice: str = OTHERWISE
    tool: str | None = None
    call: Call | None = None
    answer: str | None = None


class _Turn(NamedTuple):
    workflow: Workflow
    spec: TurnSpec
    tool: str  # chosen by the turn before


def read_output(workflow: Workflow, spec: TurnSpec, tool: str, output: TurnOutput) -> Reading:
    """Read what a turn wrote; `tool` is what the turn before it chose, for a turn that writes an argument."""
    turn, read = _Turn(workflow, spec, tool), _READERS[spec.writes]
    if output.finish_reason != "length":
        return read(turn, output.text)
    shorter = drop_repetition(output.text)
    found: Malformed = "unended" if shorter is None else "repetition"
    reading = read(turn, output.text if shorter is None else shorter)
    return reading._replace(malformed=(found, *reading.malformed))


def _read_text(turn: _Turn, text: str) -> Reading:
    return Reading(text + turn.spec.end, () if text.strip() else ("empty_text",))


def _read_answer(turn: _Turn, text: str) -> Reading:
    return _read_text(turn, text)._replace(answer=text.strip())


def _read_tool(turn: _Turn, text: str) -> Reading:
    tool = read_tool(text, turn.workflow.tools)
    if tool is None:
        problem: Malformed = "unknown_action" if text.strip() else "no_action"
        return Reading(text + "\n", (problem,), INVALID)
    return Reading(text + turn.spec.end, tool=tool)


def _read_argument(turn: _Turn, text: str) -> Reading:
    if not text.strip():
        return Reading(text + turn.spec.end, ("empty_argument",), INVALID)
    return Reading(text + turn.spec.end, call=Call(turn.tool, text.strip()))


def _read_call(turn: _Turn, text: str) -> Reading:
    call = read_call(text, turn.workflow.tools)
    if not isinstance(call, Call):
        return Reading(text + turn.spec.end, (call,), INVALID)
    return Reading(text + turn.spec.end, call=call)


def _read_choice(turn: _Turn, text: str) -> Reading:
    choice = read_choice(text, [key for key in turn.spec.next if key != INVALID])
    if choice is None:
        return Reading(text + turn.spec.end, ("unknown_choice",), INVALID)
    return Reading(text + turn.spec.end, choice=choice)


_READERS: dict[Writes, Callable[[_Turn, str], Reading]] = {
    "text": _read_text,
    "answer": _read_answer,
    "tool": _read_tool,
    "argument": _read_argument,
    "call": _read_call,
    "choice": _read_choice,
}
