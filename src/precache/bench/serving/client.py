"""One streamed completion over HTTP, timed as a caller sees it."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from precache.bench.serving.process import HOST
from precache.errors import PrecacheError

TIMEOUT_S = 3600.0


class TurnError(PrecacheError):
    """The server did not answer a turn as asked."""


@dataclass(frozen=True)
class Turn:
    """A turn's figures; seconds count from sending the request."""

    token_ids: tuple[int, ...]
    ttft_s: float
    latency_s: float
    prompt_tokens: int
    cached_tokens: int


def run_turn(port: int, model: str, prompt: Sequence[int], output_tokens: int) -> Turn:
    """Run a greedy turn of exactly ``output_tokens`` tokens. Raises TurnError, OSError."""
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection(HOST, port, timeout=TIMEOUT_S)
    started = time.perf_counter()
    try:
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        return _read(connection.getresponse(), started, len(prompt), output_tokens)
    finally:
        connection.close()


def _read(
    response: http.client.HTTPResponse, started: float, prompt_tokens: int, output_tokens: int
) -> Turn:
    if response.status != 200:
        raise TurnError(f"status {response.status}: {response.read(2000).decode()}")
    token_ids: list[int] = []
    arrivals: list[float] = []
    cached = 0
    for event in _events(response):
        now = time.perf_counter()
        for choice in event.get("choices", ()):
            if found := choice.get("token_ids"):
                token_ids += found
                arrivals.append(now)
        if usage := event.get("usage"):
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    if len(token_ids) != output_tokens:
        raise TurnError(f"output: got {len(token_ids)} tokens, asked for {output_tokens}")
    latency_s = arrivals[-1] - started
    return Turn(tuple(token_ids), arrivals[0] - started, latency_s, prompt_tokens, cached)


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The objects of a server-sent event stream."""
    for line in response:
        text = line.decode().strip()
        if text.startswith("data: ") and text != "data: [DONE]":
            yield json.loads(text.removeprefix("data: "))
