"""What an episode leaves behind: turns, tool calls, malformed outputs, the answer. Plain data, to and from JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from precache.agents.tools import ToolStatus
from precache.request import Timings, Usage
from precache.tasks.trajectory import Segment, Trajectory

Outcome = Literal[
    "accepted",  # the workflow came to its end
    "max_steps",
    "max_cycles",
    "max_output_tokens",
    "max_context_tokens",
    "malformed",  # too many unreadable outputs one after the other
    "repeating",  # the same action over and over
    "refused",  # the endpoint refused a turn; `error` says why
]


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One turn as the endpoint answered it; `written` is what went into the trajectory."""

    name: str
    role: str
    step: int
    prompt_chars: int
    text: str
    written: str
    finish_reason: str
    timings: Timings
    usage: Usage | None
    malformed: tuple[str, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One action that was carried out, and what the roles read about it."""

    step: int
    tool: str
    argument: str
    observation: str
    status: ToolStatus
    seconds: float


@dataclass(slots=True)
class EpisodeRecord:
    """A whole episode. `scores` are filled in by whoever knows the answer."""

    question_id: str
    segments: list[Segment] = field(default_factory=list)
    turns: list[TurnRecord] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)
    malformed: Counter[str] = field(default_factory=Counter)
    answer: str | None = None
    steps: int = 0
    cycles: int = 0
    outcome: Outcome | None = None
    error: str | None = None
    scores: dict[str, float] = field(default_factory=dict)

    @property
    def trajectory(self) -> Trajectory:
        """The episode as the one text that every role read."""
        return Trajectory(self.question_id, tuple(self.segments))

    def as_dict(self) -> dict[str, Any]:
        """Return what goes into a JSON line. Token ids are left out: the text is all there."""
        values = asdict(self)
        values["malformed"] = dict(self.malformed)  # asdict takes a Counter apart wrongly
        for turn in values["turns"]:
            del turn["prompt_token_ids"], turn["token_ids"]
        return values


def episode_from_dict(values: Mapping[str, Any]) -> EpisodeRecord:
    """Return the record of a JSON line. Raises KeyError or TypeError if it is none."""
    rest = {key: values[key] for key in ("question_id", "answer", "steps", "cycles", "outcome")}
    return EpisodeRecord(
        **rest,
        error=values["error"],
        scores=dict(values["scores"]),
        malformed=Counter(values["malformed"]),
        segments=[Segment(**segment) for segment in values["segments"]],
        tool_calls=[ToolCall(**call) for call in values["tool_calls"]],
        turns=[_turn(turn) for turn in values["turns"]],
    )


def _turn(values: Mapping[str, Any]) -> TurnRecord:
    usage = values["usage"]
    return TurnRecord(
        **{
            **values,
            "timings": Timings(**values["timings"]),
            "usage": None if usage is None else Usage(**usage),
            "malformed": tuple(values["malformed"]),
        }
    )
