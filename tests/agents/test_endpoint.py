"""The client of endpoints against a small fake OpenAI server that also answers what a good one never would."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from precache.agents import (
    EndpointError,
    Episode,
    HttpClient,
    TurnRefusedError,
    TurnRequest,
    load_workflow,
)

REQUEST = TurnRequest("plan", "Question: x\nThought 1:", 4, ("\n",))


class _FakeOpenAI(BaseHTTPRequestHandler):
    """Streams the scripted texts in two pieces each, with usage last; records the requests."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server: Any = self.server
        server.requests.append((self.path, body, self.headers["Authorization"]))
        if server.status != 200:
            error = {"error": {"message": "no such thing", "type": "t", "param": None, "code": "c"}}
            return self._answer(server.status, json.dumps(error).encode())
        if server.broken is not None:
            lines = f"data: {json.dumps(self._chunk('Go'))}\n\n{server.broken}"
            return self._answer(200, lines.encode(), "text/event-stream", more=server.more)
        text = server.texts.pop(0)
        chunks = [self._chunk(text[:3]), self._chunk(text[3:], finish_reason="stop")]
        usage = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}
        usage = {**usage, "prompt_tokens_details": {"cached_tokens": 7}}
        chunks.append({**self._chunk(""), "choices": [], "usage": usage})
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"]
        return self._answer(200, "".join(lines).encode(), "text/event-stream")

    def _chunk(self, text: str, finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "finish_reason": finish_reason, "logprobs": None}
        head = {"id": "c", "object": "text_completion", "created": 0, "model": "m"}
        return {**head, "choices": [choice]}

    def _answer(
        self, status: int, body: bytes, kind: str = "application/json", more: int = 0
    ) -> None:
        """`more` bytes are promised and never come."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body) + more))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Any]:
    fake: Any = ThreadingHTTPServer(("127.0.0.1", 0), _FakeOpenAI)
    fake.daemon_threads = True
    fake.requests, fake.texts, fake.status = [], [], 200
    fake.broken, fake.more = None, 0
    thread = threading.Thread(target=fake.serve_forever, daemon=True)
    thread.start()
    yield fake
    fake.shutdown()
    fake.server_close()
    thread.join()


def url(server: Any) -> str:
    return f"http://127.0.0.1:{server.server_port}/v1"


def test_an_episode_over_http_is_the_same_text(server: Any) -> None:
    server.texts = [" A cat.", " Good.", " accept"]
    client = HttpClient(url(server), models={"critic": "critic-lora"})
    episode = Episode(load_workflow("writer_critic"), client, "w", {"question": "A cat?"}, {})
    turns = list(episode.play())
    assert episode.record.outcome == "accepted"
    assert [turn.text for turn in turns] == [" A cat.", " Good.", " accept"]
    assert [path for path, *_ in server.requests] == ["/v1/completions"] * 3
    bodies = [body for _, body, _ in server.requests]
    assert [body["model"] for body in bodies] == ["writer", "critic-lora", "critic-lora"]
    assert bodies[2]["prompt"] == bodies[1]["prompt"] + " Good.\nVerdict 1:"
    assert (bodies[0]["stop"], bodies[0]["max_tokens"], bodies[0]["temperature"]) == (["\n"], 96, 0)
    usage = turns[0].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (9, 7, 2)
    assert 0 < turns[0].timings.ttft_s <= turns[0].timings.total_s


def test_forced_text_over_http_is_read_by_its_writer(server: Any) -> None:
    server.texts = [" Good", " x"] * 2
    client = HttpClient(url(server))
    request = TurnRequest("critic", "Draft 1: A cat.\nRemark 1:", 8, ("\n",))
    assert client.force(request, " Good\n").kept
    assert not client.force(request, " Goodness\n").kept
    assert server.requests[1][1]["prompt"] == request.prompt + " Good\n"
    assert server.requests[1][1]["model"] == "critic"


def test_the_key_is_sent(server: Any) -> None:
    server.texts = [" A."]
    HttpClient(url(server), api_key="secret-key").complete(REQUEST)
    assert server.requests[0][2] == "Bearer secret-key"


@pytest.mark.parametrize("status", [400, 413, 422])
def test_one_request_may_be_refused(status: int, server: Any) -> None:
    server.status = status
    with pytest.raises(TurnRefusedError, match=f"answered {status} for plan: no such thing$"):
        HttpClient(url(server)).complete(REQUEST)


@pytest.mark.parametrize("status", [401, 404])
def test_an_endpoint_that_would_refuse_every_turn_is_told_apart(status: int, server: Any) -> None:
    server.status = status
    with pytest.raises(EndpointError, match=f"answered {status} for plan: no such thing$"):
        HttpClient(url(server)).complete(REQUEST)


def test_an_endpoint_that_is_not_there_is_named() -> None:
    with pytest.raises(EndpointError, match="http://127.0.0.1:9/v1/ cannot be reached"):
        HttpClient("http://127.0.0.1:9/v1", timeout_s=2).complete(REQUEST)


@pytest.mark.parametrize(
    ("rest", "more", "message"),
    [
        ("", 0, "ended an answer before its finish_reason"),
        ("data: [DONE]\n\n", 0, "ended an answer before its finish_reason"),
        ("", 10, "broke off an answer of plan"),
        ("data: <html>\n\n", 0, "broke off an answer of plan"),
        (
            'data: {"error": {"message": "shutting down"}}\n\n',
            0,
            "broke off an answer of plan: shutting down",
        ),
    ],
    ids=["ended", "done", "cut", "garbage", "error-event"],
)
def test_half_an_answer_is_an_error_and_never_a_turn(
    rest: str, more: int, message: str, server: Any
) -> None:
    server.broken, server.more = rest, more
    with pytest.raises(EndpointError, match=message):
        HttpClient(url(server)).complete(REQUEST)
