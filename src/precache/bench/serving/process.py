"""A vLLM server, and what its /metrics say."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from precache.bench import local_server
from precache.vllm_plugin.launch import Launch, vllm_command

START_TIMEOUT_S = 900.0
POLL_S = 0.25


@dataclass(frozen=True)
class ServedModel:
    """A running server."""

    port: int

    def num_blocks(self) -> int:
        """Blocks of the KV cache."""
        found = re.search(r'num_gpu_blocks="(\d+)"', self._metrics())
        return int(found[1]) if found else 0

    def cache_usage(self) -> float:
        """The share of blocks that running requests hold."""
        lines = self._metrics().splitlines()
        usage = [line for line in lines if line.startswith("vllm:kv_cache_usage_perc")]
        return float(usage[0].rsplit(" ", 1)[1]) if usage else 0.0

    def _metrics(self) -> str:
        return local_server.get(self.port, "/metrics")

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
    """Start a server on a free port, wait for it, and end it with its children. Raises ServerError.

    Without a policy vLLM is told to load no plugin.
    """
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    if launch.policy is None:
        environment["VLLM_PLUGINS"] = "none"
    with local_server.running_server(
        "the vLLM server",
        lambda port: vllm_command(replace(launch, port=port)),
        environment,
        START_TIMEOUT_S,
    ) as server:
        yield ServedModel(server.port)
