"""A real `precache serve --engine vllm` in processes of its own, and a small client."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 420


class Server:
    """A running server."""

    def __init__(self, port: int, process: subprocess.Popen[bytes], log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.process = process
        self.log = log

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return str(answer.read().decode())

    def post(self, path: str, body: Mapping[str, Any], timeout: float = 240) -> Any:
        """The answer's JSON (or text), or the error's."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            return {"status": error.code, "error": error.read().decode()}
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return text

    def complete(self, agent: str, prompt: Sequence[int], max_tokens: int, **body: Any) -> Any:
        """A greedy completion over token ids, with log-probabilities."""
        return self.post(
            "/v1/completions",
            {
                "model": agent,
                "prompt": list(prompt),
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "logprobs": 1,
                "return_tokens_as_token_ids": True,
                **body,
            },
        )

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        lines = [line for line in self.get("/metrics").splitlines() if line.startswith(name)]
        assert lines, f"no metric {name}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def token_ids(answer: Any) -> list[int]:
    tokens = answer["choices"][0]["logprobs"]["tokens"]
    return [int(token.removeprefix("token_id:")) for token in tokens]


def logprobs(answer: Any) -> list[float]:
    return list(answer["choices"][0]["logprobs"]["token_logprobs"])


def cached(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@contextmanager
def serve(
    model: str, adapters: Mapping[str, Path], policy: str, log: Path, *flags: str
) -> Iterator[Server]:
    """Start a server on a free port and wait until it answers; it is gone at the end, with its children."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    named = [part for name, path in adapters.items() for part in ("--adapter", f"{name}={path}")]
    command = [sys.executable, "-m", "precache", "serve", model, "--engine", "vllm", *named]
    command += ["--policy", policy, "--served-model-name", "base", "--port", str(port)]
    command += ["--dtype", "float32", "--context-window", "512", "--cache-memory", "32MiB"]
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    }
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--", *flags],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    server = Server(port, process, log)
    try:
        _wait(server)
        yield server
    finally:
        _end(process)


def _wait(server: Server) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            break
        try:
            server.get("/health")
        except OSError:
            time.sleep(0.5)
        else:
            return
    raise AssertionError(f"the server did not come up:\n{server.log.read_text()[-4000:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    import psutil

    try:
        children = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        children = []
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for child in children:
        if child.is_running():
            child.kill()
