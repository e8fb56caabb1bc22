"""Where a turn's text comes from: the protocol of clients, and what goes in and out.

`endpoint.py` and `inprocess.py` hold the two clients. The loop knows the protocol only, so an
episode is the same text wherever it runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from precache.errors import PrecacheError
from precache.request import Timings, Usage


class EndpointError(PrecacheError):
    """The endpoint cannot be used at all: it is unreachable, unauthorised or broken."""


class TurnRefusedError(PrecacheError):
    """The endpoint refused one request (the prompt is too long, ...); others may work."""


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One turn. `seed` counts only where `temperature` is above 0."""

    agent: str
    prompt: str
    max_tokens: int
    stop: tuple[str, ...]
    temperature: float = 0.0
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class TurnOutput:
    """What an agent wrote, without the stop string.

    `usage` is None where the endpoint reports none; token ids are known in process only.
    """

    text: str
    finish_reason: str
    timings: Timings
    usage: Usage | None = None
    prompt_token_ids: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ForcedOutput:
    """A turn that was made to say a recorded text.

    `kept`: the agent would have written exactly this by itself (greedily). Log-probabilities are
    None over HTTP, where an endpoint cannot be asked for them in a portable way.
    """

    kept: bool
    seconds: float
    tokens: int | None = None
    nll: float | None = None
    top1: int | None = None


class CompletionClient(Protocol):
    """Runs turns. Raises TurnRefusedError for one request, EndpointError where none would work."""

    def begin_episode(self) -> None:
        """Forget what earlier episodes cached, where the client can: episodes stay independent."""
        ...

    def complete(self, request: TurnRequest) -> TurnOutput:
        """Let an agent write."""
        ...

    def force(self, request: TurnRequest, text: str) -> ForcedOutput:
        """Make the agent say `text`; the cache is left as if it had written it."""
        ...
