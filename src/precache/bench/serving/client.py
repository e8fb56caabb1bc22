"""One streamed completion over HTTP, timed as a caller sees it."""

from __future__ import annotations

import http.client
import time
from collections.abc import Sequence
from dataclasses import dataclass

from precache.bench.local_server import TurnError, events, post


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
    started = time.perf_counter()
    with post(port, "/v1/completions", body) as response:
        return _read(response, started, len(prompt), output_tokens)


def _read(
    response: http.client.HTTPResponse, started: float, prompt_tokens: int, output_tokens: int
) -> Turn:
    token_ids: list[int] = []
    arrivals: list[float] = []
    cached = 0
    for event in events(response):
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
