"""O26 and the clients people have: the stock openai client in an agents' loop, LangChain, and schemathesis."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest

from tests.server.conftest import AGENTS
from tests.server.live import LiveServer


class Process(NamedTuple):
    """`precache serve`, as a user starts it."""

    popen: subprocess.Popen[str]
    client: openai.OpenAI


@pytest.fixture
def process(model: str, adapter_root: Path) -> Iterator[Process]:
    command = [sys.executable, "-m", "precache", "serve", model, "--port", "0"]
    command += ["--served-model-name", "tiny", "--shutdown-grace", "1", "--json"]
    for name in AGENTS:
        command += ["--adapter", f"{name}={adapter_root / name}"]
    popen = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert popen.stdout is not None
    facts = json.loads(popen.stdout.readline())
    assert facts["models"] == ["tiny", *AGENTS]
    client = openai.OpenAI(base_url=f"{facts['url']}/v1", api_key="none", max_retries=0)
    yield Process(popen, client)
    client.close()
    if popen.poll() is None:
        popen.kill()
    popen.stdout.close()
    popen.wait()


@pytest.mark.slow
def test_one_command_one_port_three_agents_six_turns(process: Process) -> None:
    history = "Question: what is it?\n"
    for number, agent in enumerate((*AGENTS, *AGENTS), start=1):
        answer = process.client.completions.create(
            model=agent, prompt=history, max_tokens=8, temperature=0, stop=["\n"]
        )
        assert answer.model == agent
        assert answer.usage is not None
        details = answer.usage.prompt_tokens_details
        assert details is not None
        assert details.cached_tokens is not None
        assert (details.cached_tokens > 0) == (number > 1)
        history += answer.choices[0].text + "\nObservation: nothing new.\n"


@pytest.mark.slow
def test_sigterm_ends_streams_properly_and_exits_with_0(process: Process) -> None:
    ends: list[str] = []

    def stream(max_tokens: int) -> None:
        try:
            chunks = list(
                process.client.completions.create(
                    model="plan",
                    prompt="abc",
                    max_tokens=max_tokens,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )
            )
            ends.append(str(chunks[-1].choices[0].finish_reason))
        except openai.APIError as error:
            ends.append(str(error.code))

    threads = [threading.Thread(target=stream, args=(500,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    process.popen.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join(timeout=30)
    assert process.popen.wait(timeout=30) == 0
    assert len(ends) == 4
    assert {"shutting_down"} <= set(ends) <= {"length", "shutting_down"}


def test_langchain_works(server: LiveServer) -> None:
    langchain = pytest.importorskip("langchain_openai")
    chat = langchain.ChatOpenAI(
        model="plan", base_url=f"{server.url}/v1", api_key="none", temperature=0, max_tokens=6
    )
    answer = chat.invoke([("system", "be brief"), ("human", "hello")])
    assert answer.response_metadata["model_name"] == "plan"
    assert answer.usage_metadata["input_token_details"]["cache_read"] == 0
    streamed = "".join(str(chunk.content) for chunk in chat.stream([("human", "hello")]))
    assert streamed == chat.invoke([("human", "hello")]).content


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_schemathesis_finds_no_server_error(server: LiveServer) -> None:
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings

    schema = schemathesis.openapi.from_dict(server.app.openapi())
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) >= 9
    for operation in operations:

        @given(case=operation.as_strategy())
        @settings(
            max_examples=40,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def check(case: Any) -> None:
            response = case.call(base_url=server.url)
            assert response.status_code < 500, (case.as_curl_command(), response.text)

        check()


def test_the_command_refuses_what_it_cannot_do(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from precache.cli.main import main

    monkeypatch.delitem(os.environ, "PRECACHE_API_KEY", raising=False)
    for options, text in (
        (["--engine", "vllm", "--max-queue", "3"], "--max-queue: got 3"),
        (["--engine", "vllm", "--recompute-share", "0"], "--recompute-share: got 0.0"),
        (["--engine", "vllm", "--calibration", "x"], "--calibration: got"),
        (["--engine", "vllm", "--json"], "--json"),
        (["--engine", "vllm", "--", "--host=0.0.0.0"], "--host: got 'after --'"),
        (["--host", "0.0.0.0"], "API key"),
        (["--port", "99999"], "port"),
        (["--api-key", "short"], "--api-key: got '5 characters'"),
        (["--admin-key", "short"], "--admin-key: got '5 characters'"),
        (["--adapter-root", "/nowhere"], "adapter-root"),
    ):
        assert main(["serve", model, *options]) == 2
        assert text in capsys.readouterr().err
