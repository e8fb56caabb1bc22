"""Where a turn's text comes from: one protocol, and the client of any OpenAI-compatible endpoint.

`inprocess.py` holds the other client. The loop knows the protocol only, so an episode is the same
text wherever it runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from precache.errors import PrecacheError
from precache.request import Timings, Usage

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types import Completion as OpenAICompletion


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


class HttpClient:
    """The stock `openai` client against `/v1/completions`, streamed to measure the first token.

    `models` renames roles: an endpoint knows agents by model name.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str = "none",
        models: Mapping[str, str] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self._models = dict(models or {})
        self._client = _openai_client(base_url, api_key, timeout_s)

    def begin_episode(self) -> None:
        """Nothing: a server's cache is its own."""

    def complete(self, request: TurnRequest) -> TurnOutput:
        """Let an agent write."""
        started = time.perf_counter()
        ttft_s: float | None = None
        pieces: list[str] = []
        finish_reason, usage = "", None
        for chunk in self._stream(request, request.prompt):
            for choice in chunk.choices:
                if choice.text and ttft_s is None:
                    ttft_s = time.perf_counter() - started
                pieces.append(choice.text or "")
                finish_reason = choice.finish_reason or finish_reason
            usage = _usage(chunk) or usage
        total_s = time.perf_counter() - started
        return TurnOutput(
            text="".join(pieces),
            finish_reason=finish_reason or "unknown",
            timings=Timings(total_s if ttft_s is None else ttft_s, total_s),
            usage=usage,
        )

    def force(self, request: TurnRequest, text: str) -> ForcedOutput:
        """Compare the agent's own text with `text`, then have the agent read `text` as its own.

        The second request leaves the tokens of `text` in the cache as written by this agent.
        """
        own = self.complete(request)
        for _ in self._stream(request, request.prompt + text, max_tokens=1):
            pass
        return ForcedOutput(_is_kept(own.text, text, request.stop), own.timings.total_s)

    def _stream(
        self, request: TurnRequest, prompt: str, max_tokens: int | None = None
    ) -> Iterator[OpenAICompletion]:
        from openai import APIConnectionError, APIStatusError

        try:
            yield from self._client.completions.create(
                model=self._models.get(request.agent, request.agent),
                prompt=prompt,
                max_tokens=max_tokens or request.max_tokens,
                stop=list(request.stop),
                temperature=request.temperature,
                seed=request.seed,
                stream=True,
                stream_options={"include_usage": True},
            )
        except APIConnectionError as error:
            raise EndpointError(f"{self._client.base_url} cannot be reached: {error}") from error
        except APIStatusError as error:
            message = f"{self._client.base_url} answered {error.status_code}: {error.message}"
            if error.status_code in (400, 413, 422):
                raise TurnRefusedError(message) from error
            raise EndpointError(message) from error


def _is_kept(own: str, text: str, stop: tuple[str, ...]) -> bool:
    """Whether `text` is `own` and then the stop string that ended it."""
    return text.startswith(own) and text[len(own) :].startswith(stop)


def _usage(chunk: OpenAICompletion) -> Usage | None:
    if chunk.usage is None:
        return None
    details = chunk.usage.prompt_tokens_details
    cached = details.cached_tokens if details is not None else None
    return Usage(chunk.usage.prompt_tokens, chunk.usage.completion_tokens, cached or 0)


def _openai_client(base_url: str, api_key: str, timeout_s: float) -> OpenAI:
    try:
        from openai import OpenAI
    except ImportError as error:
        raise EndpointError(
            "an endpoint needs the openai client, which is not installed: "
            "pip install 'precache[agents]'"
        ) from error
    return OpenAI(base_url=base_url, api_key=api_key, timeout=timeout_s)
