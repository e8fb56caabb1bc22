"""The client of any OpenAI-compatible endpoint: ours, vLLM's, a hosted one. Uses the stock `openai` package."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from precache.agents.client import (
    EndpointError,
    ForcedOutput,
    TurnOutput,
    TurnRefusedError,
    TurnRequest,
)
from precache.request import Timings, Usage

if TYPE_CHECKING:
    from openai import APIStatusError, OpenAI
    from openai.types import Completion

_REFUSALS = (400, 413, 422)  # of this request; another one may be answered


class HttpClient:
    """Turns over `/v1/completions`, streamed to measure the first token.

    `models` renames roles: an endpoint knows agents by model name. `timeout_s` is the longest silence
    that is waited for. Raises EndpointError where the `openai` package is missing.
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
        """Let an agent write. An answer that breaks off is an EndpointError, never a shorter turn."""
        started = time.perf_counter()
        ttft_s: float | None = None
        pieces: list[str] = []
        finish_reason, usage = None, None
        for chunk in self._stream(request, request.prompt):
            for choice in chunk.choices:
                if choice.text and ttft_s is None:
                    ttft_s = time.perf_counter() - started
                pieces.append(choice.text or "")
                finish_reason = choice.finish_reason or finish_reason
            usage = _usage(chunk) or usage
        if finish_reason is None:
            raise EndpointError(f"{self._client.base_url} ended an answer before its finish_reason")
        total_s = time.perf_counter() - started
        return TurnOutput(
            text="".join(pieces),
            finish_reason=finish_reason,
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
    ) -> Iterator[Completion]:
        """Yield the chunks of an answer. Raises TurnRefusedError and EndpointError."""
        from openai import APIConnectionError, APIStatusError

        url = self._client.base_url
        try:
            stream = self._client.completions.create(
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
            raise EndpointError(f"{url} cannot be reached: {error.__cause__ or error}") from error
        except APIStatusError as error:
            message = f"{url} answered {error.status_code} for {request.agent}: {_said(error)}"
            kind = TurnRefusedError if error.status_code in _REFUSALS else EndpointError
            raise kind(message) from error
        try:
            yield from stream
        except Exception as error:  # the connection, an error event, JSON: all of it the endpoint's
            reason = str(error) or type(error).__name__
            raise EndpointError(
                f"{url} broke off an answer of {request.agent}: {reason}"
            ) from error


def _said(error: APIStatusError) -> str:
    """Return the endpoint's own words, without the Python of its whole body around them."""
    body = error.body
    said = body.get("message") if isinstance(body, dict) else None
    return str(said or error.message)


def _is_kept(own: str, text: str, stop: tuple[str, ...]) -> bool:
    """Whether `text` is `own` and then the stop string that ended it."""
    return text.startswith(own) and text[len(own) :].startswith(stop)


def _usage(chunk: Completion) -> Usage | None:
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
