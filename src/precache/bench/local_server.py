"""A server in processes of its own, on a free port of this machine. Owns starting, asking and ending it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from precache.errors import PrecacheError

HOST = "127.0.0.1"
ANSWER_TIMEOUT_S = 3600.0  # between two pieces of an answer
LOG_TAIL = 3000  # characters


class ServerError(PrecacheError):
    """The server did not come up, or broke off."""

    def __init__(self, what: str, log: str) -> None:
        self.log = log
        super().__init__(f"{what}; the end of its log:\n{log[-LOG_TAIL:]}")


class TurnError(PrecacheError):
    """The server did not answer a turn as asked."""


@dataclass(frozen=True)
class LocalServer:
    """A running server."""

    name: str
    port: int
    process: subprocess.Popen[bytes]
    log: Path

    def error(self, what: str) -> ServerError:
        """An error with the end of the log."""
        log = self.log.read_text(encoding="utf-8", errors="replace")
        return ServerError(f"{self.name} {what}", log)


def get(port: int, path: str) -> str:
    """The body of a GET. Raises OSError when nobody answers, or not with status 200."""
    connection = http.client.HTTPConnection(HOST, port, timeout=60)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read().decode()
        if response.status != 200:
            raise OSError(f"GET {path}: status {response.status}")
        return body
    finally:
        connection.close()


@contextmanager
def post(port: int, path: str, body: object) -> Iterator[http.client.HTTPResponse]:
    """Post JSON and give the answer to read. Raises TurnError unless its status is 200, and OSError."""
    connection = http.client.HTTPConnection(HOST, port, timeout=ANSWER_TIMEOUT_S)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            said = response.read(2000).decode(errors="replace")
            raise TurnError(f"status {response.status}: {said}")
        yield response
    finally:
        connection.close()


def events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The objects of a server-sent event stream."""
    for line in response:
        text = line.decode().strip()
        if text.startswith("data: ") and text != "data: [DONE]":
            yield json.loads(text.removeprefix("data: "))


@contextmanager
def running_server(
    name: str,
    command: Callable[[int], Sequence[str]],
    environment: Mapping[str, str],
    timeout_s: float,
) -> Iterator[LocalServer]:
    """Start ``command(port)``, wait until /health answers with 200, and end it with its children, whatever happens.

    Raises ServerError when it ends before that, or needs more than ``timeout_s``.
    """
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix="precache-server-") as folder:
        log = Path(folder) / "log.txt"
        with log.open("wb") as out:
            process = subprocess.Popen(
                command(port),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        try:
            server = LocalServer(name, port, process, log)
            _wait(server, timeout_s)
            yield server
        finally:
            _end(process)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind((HOST, 0))
        return int(free.getsockname()[1])


def _wait(server: LocalServer, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if (status := server.process.poll()) is not None:
            raise server.error(f"ended with status {status} before it was ready")
        try:
            get(server.port, "/health")
        except (OSError, http.client.HTTPException):
            time.sleep(0.25)
        else:
            return
    raise server.error(f"was not ready after {timeout_s:.0f} s")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the server to end, then end its whole session: what it started are its children."""
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
