"""A vLLM server in processes of its own, and what its /metrics say. Owns starting, watching and ending it."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from precache.errors import PrecacheError
from precache.vllm_plugin.launch import Launch, vllm_command

START_TIMEOUT_S = 900.0
POLL_S = 0.25
HOST = "127.0.0.1"


class ServerStartError(PrecacheError):
    """The server did not come up."""

    def __init__(self, log: str) -> None:
        self.log = log
        super().__init__(f"the server did not come up; the end of its log:\n{log[-3000:]}")


class ServedModel:
    """A running server."""

    def __init__(self, port: int, process: subprocess.Popen[bytes]) -> None:
        self.port = port
        self.process = process

    def get(self, path: str) -> str:
        """The body of a GET; OSError when the server does not answer."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=60)
        try:
            connection.request("GET", path)
            return connection.getresponse().read().decode()
        finally:
            connection.close()

    def num_blocks(self) -> int:
        """Blocks of the KV cache."""
        found = re.search(r'num_gpu_blocks="(\d+)"', self.get("/metrics"))
        return int(found[1]) if found else 0

    def cache_usage(self) -> float:
        """The share of blocks that running requests hold."""
        lines = self.get("/metrics").splitlines()
        usage = [line for line in lines if line.startswith("vllm:kv_cache_usage_perc")]
        return float(usage[0].rsplit(" ", 1)[1]) if usage else 0.0

    @contextmanager
    def watched(self) -> Iterator[list[float]]:
        """Collect cache_usage while the block runs."""
        seen: list[float] = [0.0]
        done = threading.Event()

        def watch() -> None:
            while not done.wait(POLL_S):
                seen.append(self.cache_usage())

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield seen
        finally:
            done.set()
            thread.join()


@contextmanager
def running_server(launch: Launch) -> Iterator[ServedModel]:
    """Start a server on a free port, wait for it, and end it with its children. Raises ServerStartError.

    Without a policy vLLM is told to load no plugin.
    """
    port = _free_port()
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    if launch.policy is None:
        environment["VLLM_PLUGINS"] = "none"
    with tempfile.TemporaryDirectory(prefix="precache-serving-") as folder:
        log = Path(folder) / "log.txt"
        with log.open("wb") as out:
            process = subprocess.Popen(
                vllm_command(replace(launch, port=port)),
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        server = ServedModel(port, process)
        try:
            _wait(server, log)
            yield server
        finally:
            _end(process)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind((HOST, 0))
        return int(free.getsockname()[1])


def _wait(server: ServedModel, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and server.process.poll() is None:
        try:
            server.get("/health")
        except OSError:
            time.sleep(0.5)
        else:
            return
    raise ServerStartError(log.read_text(encoding="utf-8", errors="replace"))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the server to end, then end its whole session: engine core and workers are its children."""
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
