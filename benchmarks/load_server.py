"""Load and faults of `precache serve`, as a process of its own with a tiny random model.

What is measured is the server: its queue, its cache budget, its memory, and what it does with clients that misbehave.

    python benchmarks/load_server.py            all four parts, a table and one JSON line
    python benchmarks/load_server.py load --clients 50 --turns 20

Parts: `load` (50 clients x 20 turns over 10 trajectories), `disconnect` (every 5th client leaves in mid-stream),
`sigterm` (in mid-load), `fuzz` (10,000 malformed requests). Needs the dev extra.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.reference.lora import make_adapter
from tests.reference.models import save_tiny

AGENTS = ("plan", "action", "reflect")
BUDGET = "2MiB"
KEEP_ALIVE = httpx.Limits(max_connections=100)


class Server:
    """The process, and what is read off it."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "precache", "serve", str(folder / "model"), "--port", "0"]
        for name in AGENTS:
            command += ["--adapter", f"{name}={folder / name}"]
        command += ["--policy", "prelrshared", "--cache-memory", BUDGET, "--max-queue", "100"]
        command += ["--served-model-name", "tiny", "--shutdown-grace", "2"]
        self._log = folder / "server.log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(command, stderr=log)
        self.url = self._wait_for_url()
        self._rss = psutil.Process(self.process.pid)

    def _wait_for_url(self) -> str:
        while self.process.poll() is None:
            found = re.search(r"Uvicorn running on (\S+)", self._log.read_text())
            if found is not None:
                return found[1]
            time.sleep(0.1)
        raise RuntimeError(f"the server did not start: {self._log.read_text()}")

    def rss_mib(self) -> float:
        return self._rss.memory_info().rss / 2**20

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=30)


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[Server, httpx.AsyncClient]]:
    server = Server(folder)
    try:
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=KEEP_ALIVE) as client:
            yield server, client
    finally:
        if server.process.poll() is None:
            server.stop()


def turn(trajectory: int, number: int, agent: str) -> dict[str, Any]:
    """A request for a turn of a trajectory that grows with ``number``."""
    steps = "".join(f"step {i} of {trajectory}; " for i in range(number + 1))
    prompt = f"trajectory {trajectory}: {steps}"[:440]
    return {"model": agent, "prompt": prompt, "max_tokens": 8, "temperature": 0}


class Watch:
    """Reads cache bytes and RSS while something runs."""

    def __init__(self, server: Server, client: httpx.AsyncClient) -> None:
        self._server, self._client = server, client
        self.rss: list[float] = []
        self.over_budget = 0
        self.peak_bytes = self.budget = 0

    async def run(self) -> None:
        while True:
            stats = (await self._client.get("/v1/sessions")).json()["stats"]
            self.rss.append(self._server.rss_mib())
            self.peak_bytes, self.budget = stats["peak_bytes"], stats["budget"]
            self.over_budget += max(stats["bytes_held"], stats["peak_bytes"]) > stats["budget"]
            await asyncio.sleep(0.25)


async def load(folder: Path, clients: int, turns: int) -> dict[str, Any]:
    """No error, never over budget, RSS flat over the last half."""
    statuses: Counter[int] = Counter()
    latencies: list[float] = []
    async with serving(folder) as (server, client):
        watch = Watch(server, client)
        watcher = asyncio.create_task(watch.run())

        async def agent_loop(number: int) -> None:
            for index in range(turns):
                body = turn(number % 10, index, AGENTS[(number + index) % 3])
                started = time.perf_counter()
                response = await client.post("/v1/completions", json=body)
                latencies.append(time.perf_counter() - started)
                statuses[response.status_code] += 1

        started = time.perf_counter()
        await asyncio.gather(*(agent_loop(number) for number in range(clients)))
        seconds = time.perf_counter() - started
        watcher.cancel()
        evictions = (await client.get("/v1/sessions")).json()["stats"]["evictions"]
    half = watch.rss[len(watch.rss) // 2 :]
    third = max(1, len(half) // 3)
    return {
        "requests": sum(statuses.values()),
        "statuses": dict(statuses),
        "seconds": round(seconds, 1),
        "requests_per_s": round(sum(statuses.values()) / seconds, 1),
        "latency_median_s": round(sorted(latencies)[len(latencies) // 2], 2),
        "cache_peak_bytes": watch.peak_bytes,
        "cache_budget_bytes": watch.budget,
        "samples_over_budget": watch.over_budget,
        "evictions": evictions,
        "rss_last_half_start_mib": round(sum(half[:third]) / third, 1),
        "rss_last_half_end_mib": round(sum(half[-third:]) / third, 1),
        "ok": set(statuses) == {200} and not watch.over_budget and half[-1] < half[0] * 1.05,
    }


async def disconnect(folder: Path, requests: int) -> dict[str, Any]:
    """Every 5th client leaves in mid-stream; nothing leaks, and the next turns are right."""
    async with serving(folder) as (server, client):
        body = turn(0, 3, "plan")
        expected = (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"]
        wrong = 0
        rss: list[float] = []
        for number in range(requests):
            if number % 5 == 0:
                long = {**body, "max_tokens": 300, "stream": True, "ignore_eos": True}
                async with client.stream("POST", "/v1/completions", json=long) as response:
                    await anext(response.aiter_bytes())
            else:
                answer = (await client.post("/v1/completions", json=body)).json()
                wrong += answer["choices"][0]["text"] != expected
            rss.append(server.rss_mib())
        await asyncio.sleep(0.5)
        live = (await client.get("/v1/live")).json()
        tasks = psutil.Process(server.process.pid).num_threads()
    busy = sum(session["busy"] for session in live["sessions"])
    half = rss[len(rss) // 2 :]
    return {
        "requests": requests,
        "wrong_answers": wrong,
        "still_running": live["running"] + live["waiting"],
        "busy_sessions": busy,
        "threads": tasks,
        "rss_last_half_start_mib": round(half[0], 1),
        "rss_last_half_end_mib": round(half[-1], 1),
        "ok": not wrong and not busy and not live["running"] and half[-1] < half[0] * 1.05,
    }


async def sigterm(folder: Path, streams: int) -> dict[str, Any]:
    """SIGTERM in mid-load: every stream ends with [DONE] or an error event, the exit status is 0."""
    ends: Counter[str] = Counter()
    async with serving(folder) as (server, client):

        async def stream(number: int) -> None:
            body = {**turn(number % 10, 3, AGENTS[number % 3]), "stream": True}
            body |= {"max_tokens": 400, "ignore_eos": True} if number < 3 else {}
            try:
                async with client.stream("POST", "/v1/completions", json=body) as response:
                    text = (await response.aread()).decode()
            except httpx.HTTPError as error:
                ends[f"broken: {type(error).__name__}"] += 1
                return
            if response.status_code != 200:
                ends[f"status {response.status_code}"] += 1
            elif "data: [DONE]" in text:
                ends["done"] += 1
            else:
                ends["error event" if '"error"' in text.rsplit("data: ", 1)[-1] else "cut"] += 1

        running = [asyncio.create_task(stream(number)) for number in range(streams)]
        live: dict[str, Any] = {"running": 0, "waiting": 0}
        while live["running"] + live["waiting"] < streams // 2:  # the others may have ended by then
            await asyncio.sleep(0.05)
            live = (await client.get("/v1/live")).json()
        started = time.perf_counter()
        status = await asyncio.to_thread(server.stop)
        seconds = time.perf_counter() - started
        await asyncio.gather(*running)
    allowed = {"done", "error event", "status 503"}
    return {
        "streams": streams,
        "ends": dict(ends),
        "exit_status": status,
        "seconds_to_exit": round(seconds, 1),
        "ok": status == 0 and set(ends) <= allowed,
    }


def malformed(rng: random.Random) -> tuple[str, bytes, str]:
    """A path, a body that no endpoint may accept, and its content type."""
    path = rng.choice(["/v1/completions", "/v1/chat/completions"])
    good: dict[str, Any] = {"model": "plan", "max_tokens": 1}
    if path == "/v1/completions":
        good["prompt"] = "abc"
    else:
        good["messages"] = [{"role": "user", "content": "abc"}]
    text = json.dumps(good).encode()
    kind = rng.randrange(5)
    if kind == 0:  # not JSON any more
        return path, text[: rng.randrange(len(text))], "application/json"
    if kind == 1:  # no JSON at all
        return path, b"\xff" + rng.randbytes(rng.randrange(200)), "application/json"
    if kind == 2:  # a field of a wrong type or out of range
        field = rng.choice(["temperature", "top_p", "n", "top_k", "stop", "max_tokens", "model"])
        wrong = rng.choice([{}, [[]], [None], -(10**6), 2**70, "x" * 300, {"a": [1]}])
        return path, json.dumps(good | {field: wrong}).encode(), "application/json"
    if kind == 3:  # an unknown field
        name = "".join(rng.choices("abcdefghij", k=12))
        return path, json.dumps(good | {name: rng.random()}).encode(), "application/json"
    field = rng.choice([key for key in good if key != "max_tokens"])  # one is missing
    del good[field]
    return path, json.dumps(good).encode(), rng.choice(["application/json", "text/plain"])


async def fuzz(folder: Path, requests: int, seed: int) -> dict[str, Any]:
    """Malformed requests: all 4xx, and a good one still works."""
    rng, statuses = random.Random(seed), Counter[int]()
    async with serving(folder) as (server, client):
        started = time.perf_counter()
        for _ in range(0, requests, 20):
            batch = []
            for _ in range(20):
                path, body, kind = malformed(rng)
                headers = {"Content-Type": kind}
                batch.append(client.post(path, content=body, headers=headers))
            for response in await asyncio.gather(*batch):
                statuses[response.status_code] += 1
        seconds = time.perf_counter() - started
        after = await client.post("/v1/completions", json=turn(0, 0, "plan"))
    return {
        "requests": sum(statuses.values()),
        "statuses": dict(statuses),
        "seconds": round(seconds, 1),
        "ok": all(400 <= status < 500 for status in statuses) and after.status_code == 200,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help="load, disconnect, sigterm, fuzz; default all")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--requests", type=int, default=10_000, help="of the fuzz")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_tiny("llama", folder / "model")
        for seed, agent in enumerate(AGENTS, start=1):
            make_adapter(folder / "model", folder / agent, seed=seed)
        work = {
            "load": lambda: load(folder, args.clients, args.turns),
            "disconnect": lambda: disconnect(folder, 100),
            "sigterm": lambda: sigterm(folder, 20),
            "fuzz": lambda: fuzz(folder, args.requests, args.seed),
        }
        report = {}
        for part in args.parts or work:
            report[part] = row = asyncio.run(work[part]())
            print(part, *(f"\n  {key:<26}{value}" for key, value in row.items()), flush=True)
    print(json.dumps(report))
    return 0 if all(row["ok"] for row in report.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
