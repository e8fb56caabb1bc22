"""Recorded episodes (Thought / Action / Observation text) -> checked steps.

Owns the source's oddities: calls followed by prose, old tool names, misplaced reflections,
HTML entities, very long observations, runs that never end. What cannot be read is counted.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from dataclasses import dataclass

from precache.errors import PrecacheError

OBSERVATION_CHARS = 400
VERDICTS = ("right", "wrong")

_LINE = re.compile(r"^(Thought|Action|Observation) (\d+):(.*)$")
_CALL = re.compile(r"^\s*([A-Za-z0-9]+) ?\[(.*)$")
_TOOL_ALIASES = {"BingSearch": "Search", "Bingsearch": "Search"}
_TOOL_NAMES_IN_PROSE = re.compile(r"\bbing ?search\b", re.IGNORECASE)


class EpisodeParseError(PrecacheError):
    """An episode has no usable step; the message is a short reason, fit for counting."""


@dataclass(frozen=True, slots=True)
class Step:
    """One turn of the loop; `observation` is None where the run ended, and `tool` is our name."""

    thought: str
    tool: str
    argument: str
    observation: str | None

    @property
    def is_reflection(self) -> bool:
        return self.tool == "Reflect"


@dataclass(frozen=True, slots=True)
class Episode:
    """A question, its options (None for a free answer) and the steps up to the last readable."""

    question: str
    options: str | None
    steps: tuple[Step, ...]


def parse_episode(question: str, transcript: str, tools: Iterable[str]) -> Episode:
    """Parse a recorded run; `transcript` is the source's full text, its own instructions included.

    Reading stops at the first step that breaks the format or calls a tool outside `tools`.
    Reflections that do not follow a Finish are dropped (the source answers them "Invalid action").
    Raises `EpisodeParseError` if no step, or no Finish, remains.
    """
    steps = _drop_misplaced_reflections(_read_steps(transcript, frozenset(tools)))
    if not steps:
        raise EpisodeParseError("no readable step")
    if not any(step.tool == "Finish" for step in steps):
        raise EpisodeParseError("no Finish before the first unreadable step")
    stem, options = _split_options(question)
    return Episode(stem, options, tuple(steps))


def clip(text: str, limit: int = OBSERVATION_CHARS) -> str:
    """Return text on one line, entities unescaped, cut at a word to at most `limit` characters."""
    line = " ".join(html.unescape(text).split())
    if len(line) <= limit:
        return line
    return line[: limit - 3].rsplit(" ", 1)[0] + "..."


def _read_steps(transcript: str, tools: frozenset[str]) -> list[Step]:
    lines = transcript[max(transcript.find("\nThought 1:"), 0) :].strip().split("\n")
    rows = [line for line in lines if line.strip()]
    steps: list[Step] = []
    for start in range(0, len(rows), 3):
        step = _read_step(rows[start : start + 3], number=len(steps) + 1, tools=tools)
        if step is None:
            break
        steps.append(step)
    return steps


def _read_step(rows: list[str], number: int, tools: frozenset[str]) -> Step | None:
    fields = {}
    for name, row in zip(("Thought", "Action", "Observation"), rows, strict=False):
        match = _LINE.match(row)
        if match is None or match.group(1) != name or int(match.group(2)) != number:
            return None
        fields[name] = match.group(3)
    call = _read_call(fields.get("Action", ""))
    thought = _TOOL_NAMES_IN_PROSE.sub("Search", clip(fields.get("Thought", "")))
    if call is None or call[0] not in tools or not thought:
        return None
    return Step(thought, call[0], call[1], _read_observation(fields.get("Observation")))


def _read_call(text: str) -> tuple[str, str] | None:
    """Return (tool, argument) of the first bracketed call; prose after it is dropped."""
    match = _CALL.match(text)
    end = _closing_bracket(match.group(2)) if match else None
    if match is None or end is None:
        return None
    tool = _TOOL_ALIASES.get(match.group(1), match.group(1))
    argument = clip(match.group(2)[:end])
    return (tool, argument) if argument else None


def _closing_bracket(text: str) -> int | None:
    depth = 1
    for index, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if depth == 0:
            return index
    return None


def _read_observation(text: str | None) -> str | None:
    """Return the observation, or None for the verdict that no agent sees at run time."""
    if text is None or text.strip().startswith("Answer is "):
        return None
    return _TOOL_NAMES_IN_PROSE.sub("Search", clip(text)) or "None"


def _drop_misplaced_reflections(steps: list[Step]) -> list[Step]:
    """Keep a reflection only right after a Finish; stop where a Finish is not judged right or wrong."""
    kept: list[Step] = []
    for step in steps:
        after_finish = bool(kept) and kept[-1].tool == "Finish"
        if after_finish and not (step.is_reflection and step.argument in VERDICTS):
            break
        if step.is_reflection and not after_finish:
            continue
        kept.append(step)
    return kept


def _split_options(question: str) -> tuple[str, str | None]:
    stem, marker, options = question.partition("\nOptions:")
    return " ".join(stem.split()), " ".join(options.split()) if marker else None
