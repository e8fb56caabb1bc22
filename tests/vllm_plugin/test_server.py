"""Over HTTP, with vLLM's server, engine core and worker in processes of their own."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.reference.lora import make_adapter
from tests.vllm_plugin.engines import NOTICEABLE, TOLERANCE, VLLM, reference_turn, tokens
from tests.vllm_plugin.server import Server, cached, logprobs, serve, token_ids

pytestmark = VLLM

POLICY = "rebaseshared"


@pytest.fixture(scope="module")
def server(model: str, adapters: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log.txt"
    with serve(model, adapters["qv"], POLICY, log) as server:
        yield server


def error_of(answer: Any, rows: Any) -> float:
    """Of the log-probabilities of the tokens said."""
    pairs = zip(logprobs(answer), rows, token_ids(answer), strict=True)
    return max(abs(value - float(row[token_id])) for value, row, token_id in pairs)


def settled(server: Server, name: str, wanted: float) -> bool:
    """Whether a metric comes to a value; vLLM reports while it steps."""
    for _ in range(100):
        if server.metric(name) == wanted:
            return True
        time.sleep(0.1)
    return False


def test_the_printed_command_is_vllms_own(server: Server) -> None:
    first = server.log.read_text().splitlines()[0]
    assert "-m vllm.entrypoints.openai.api_server" in first
    assert json.dumps({"precache": {"policy": POLICY}}) in first


def test_agents_find_what_others_wrote(
    server: Server, adapters: Any, reference: Callable[..., Any]
) -> None:
    state = reference(POLICY, adapters["qv"])
    other = reference("prelrshared", adapters["qv"])
    trajectory = tokens(100, seed=20)
    for turn, (agent, expected) in enumerate([("plan", 0), ("action", 128), ("reflect", 160)]):
        answer = server.complete(agent, trajectory, 30)
        assert cached(answer) == expected
        rows = reference_turn(state, agent, trajectory, token_ids(answer))
        wrong = reference_turn(other, agent, trajectory, token_ids(answer))
        assert error_of(answer, rows) < TOLERANCE
        if turn:
            assert error_of(answer, wrong) > NOTICEABLE
        trajectory = [*trajectory, *token_ids(answer), *tokens(3, seed=21 + turn)]
    assert server.metric("precache:reused_tokens_total") >= 256
    assert server.metric("precache:shadow_tokens_total") > 0
    assert server.metric("precache:lr_cache_bytes") > 0
    assert server.metric("precache:shadows_dropped_total") == 0


def test_an_adapter_with_new_weights_answers_at_once(
    server: Server, adapters: Any, model: str, tmp_path: Path, reference: Callable[..., Any]
) -> None:
    prompt = tokens(70, seed=30)
    folder = tmp_path / "plan"
    shutil.copytree(adapters["qv"]["plan"], folder)
    body = {"lora_name": "plan", "lora_path": str(folder), "load_inplace": True}
    assert "Success" in server.post("/v1/load_lora_adapter", body)
    server.complete("plan", prompt, 4)
    shutil.rmtree(folder)  # the same path, other weights
    make_adapter(model, folder, seed=88)
    assert "Success" in server.post("/v1/load_lora_adapter", body)
    answer = server.complete("plan", prompt, 4)
    rows = reference_turn(
        reference("nonshared", {"plan": folder}), "plan", prompt, token_ids(answer)
    )
    assert cached(answer) == 0
    assert error_of(answer, rows) < TOLERANCE


def test_an_unloaded_adapter_makes_room_for_another(
    server: Server, model: str, tmp_path: Path, reference: Callable[..., Any]
) -> None:
    prompt = tokens(70, seed=40)
    server.complete("action", prompt, 4)
    assert "Success" in server.post("/v1/unload_lora_adapter", {"lora_name": "reflect"})
    assert server.complete("reflect", prompt, 4)["status"] == 404
    critic = make_adapter(model, tmp_path / "critic", seed=99)
    body = {"lora_name": "critic", "lora_path": str(critic)}
    assert "Success" in server.post("/v1/load_lora_adapter", body)
    answer = server.complete("critic", prompt, 4)
    rows = reference_turn(
        reference("nonshared", {"critic": critic}), "critic", prompt, token_ids(answer)
    )
    assert cached(answer) == 0
    assert error_of(answer, rows) < TOLERANCE


def test_a_client_that_hangs_up_leaves_nothing_behind(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    for _ in range(3):
        connection = http.client.HTTPConnection(host, int(port), timeout=60)
        body = {"model": "plan", "prompt": tokens(90, seed=50), "max_tokens": 400, "stream": True}
        connection.request(
            "POST",
            "/v1/completions",
            json.dumps({**body, "ignore_eos": True}),
            {"Content-Type": "application/json"},
        )
        assert connection.getresponse().read(10)
        connection.close()
    assert settled(server, "vllm:num_requests_running", 0)
    server.complete("base", tokens(5, seed=51), 2)
    assert settled(server, "vllm:kv_cache_usage_perc", 0)


def test_a_killed_worker_ends_requests_with_an_error(server: Server) -> None:
    """The last test: the server does not come back."""
    import psutil

    family = psutil.Process(server.process.pid).children(recursive=True)
    workers = [child for child in family if "Worker" in child.name() + " ".join(child.cmdline())]
    assert workers, [(child.name(), child.cmdline()) for child in family]
    with ThreadPoolExecutor() as pool:
        answers = [
            pool.submit(server.complete, agent, tokens(60, seed=60), 400)
            for agent in ("plan", "action", "base")
        ]
        time.sleep(1.5)
        workers[0].kill()
        for answer in answers:
            with contextlib.suppress(OSError):  # a closed connection is an error too
                assert answer.result(120)["status"] >= 500
    server.process.wait(120)
