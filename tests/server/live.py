"""A real server on a real port, in a thread of the test's process, and an engine whose words can be scripted."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import torch
import uvicorn
from torch import Tensor

from precache import Engine, GenerationChunk
from precache.server import ServerSettings, build_app
from precache.server.service import Service

BASE_NAME = "tiny"


class ScriptedEngine(Engine):
    """Says what ``script`` says, token by token; ``fail_at`` breaks a turn at that token. Everything else is real."""

    script: Sequence[int] | None = None
    fail_at: int | None = None
    slow_s: float = 0.0

    def stream(self, agent: str, prompt: Any, **options: Any) -> Iterator[GenerationChunk]:
        if self.script is not None:
            options["logits_mask"] = forced(self.script)
        return self._faulty(super().stream(agent, prompt, **options))

    def _faulty(self, chunks: Iterator[GenerationChunk]) -> Iterator[GenerationChunk]:
        for count, chunk in enumerate(chunks, start=1):
            if self.fail_at is not None and count == self.fail_at:
                raise RuntimeError("an injected fault")
            time.sleep(self.slow_s)
            yield chunk

    @contextmanager
    def saying(self, text: str, *, eos: bool = True) -> Iterator[None]:
        """Script a text, with the end of sequence behind it."""
        assert self.tokenizer is not None
        ids = self.tokenizer.encode_prompt(text) if text else []
        self.script = [*ids, *([min(self.tokenizer.eos_token_ids)] if eos else [])]
        try:
            yield
        finally:
            self.script = None

    @contextmanager
    def slow(self, seconds: float) -> Iterator[None]:
        """Let every token take so long."""
        self.slow_s = seconds
        try:
            yield
        finally:
            self.slow_s = 0.0


def forced(script: Sequence[int]) -> Any:
    def mask(output_ids: Sequence[int], logits: Tensor) -> Tensor:
        if len(output_ids) >= len(script):
            return logits
        only = torch.full_like(logits, -torch.inf)
        only[script[len(output_ids)]] = 0.0
        return only

    return mask


class LiveServer:
    """The server, its engine, and clients for it."""

    def __init__(self, engine: ScriptedEngine, settings: ServerSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.app = build_app(engine, settings)
        config = uvicorn.Config(self.app, port=0, log_config=None, timeout_graceful_shutdown=5)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    @property
    def service(self) -> Service:
        service: Service = self.app.state.service
        return service

    def __enter__(self) -> LiveServer:
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive()
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"
        self.http = httpx.Client(base_url=self.url, timeout=60)
        self.client = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none-needed", max_retries=0, timeout=60
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self.client.close()
        self._server.should_exit = True
        self._thread.join(timeout=30)
        assert not self._thread.is_alive()

    # -- shorthands ----------------------------------------------------------------------------------------------

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def complete(self, model: str = "plan", prompt: Any = "abc", **options: Any) -> Any:
        options.setdefault("max_tokens", 4)
        options.setdefault("temperature", 0)
        return self.client.completions.create(model=model, prompt=prompt, **options)

    def chat(self, model: str = "plan", text: str = "hello", **options: Any) -> Any:
        options.setdefault("temperature", 0)
        options.setdefault("messages", [{"role": "user", "content": text}])
        if "max_completion_tokens" not in options:
            options.setdefault("max_tokens", 4)
        return self.client.chat.completions.create(model=model, **options)

    def error(self, path: str, **body: Any) -> dict[str, Any]:
        """The error of a request that must be refused."""
        response = self.post(path, **body)
        assert 400 <= response.status_code < 500, response.text
        error: dict[str, Any] = response.json()["error"]
        return {"status": response.status_code, **error}


def load(model: str, adapters: dict[str, Path], **options: Any) -> ScriptedEngine:
    options = {"policy": "prelrshared", "dtype": "float32", "context_window": 256, **options}
    engine = ScriptedEngine.load(model, adapters=adapters, **options)
    assert isinstance(engine, ScriptedEngine)
    return engine
