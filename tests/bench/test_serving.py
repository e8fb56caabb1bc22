"""`bench serving` without vLLM: arrivals, the client against a small server, the figures, the refusals."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from precache.bench.local_server import TurnError
from precache.bench.serving import STOCK, ServingConfig
from precache.bench.serving.client import Turn, run_turn
from precache.bench.serving.load import Load, Play, play
from precache.bench.serving.process import ServedModel
from precache.bench.serving.summary import summarise
from precache.bench.trace import Step, Trace
from precache.cli.main import main
from precache.errors import ConfigError

TRACE = Trace((Step("plan", 5, 3), Step("action", 2, 1)))


class Handler(BaseHTTPRequestHandler):
    """Streams the prompt's last token plus 1, 2, ...; every second token comes with the next one."""

    seen: list[dict[str, Any]] = []

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self._answer(
            'vllm:cache_config_info{num_gpu_blocks="200"} 1.0\nvllm:kv_cache_usage_perc{a="b"} 0.25'
        )

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append(body)
        if body["model"] == "nobody":
            self.send_response(404)
            self.end_headers()
            return
        said = [body["prompt"][-1] + 1 + i for i in range(body["max_tokens"])]
        parts = [said[:1], said[1:]] if body["model"] != "lazy" else [said[:1]]
        events = [{"choices": [{"token_ids": part}]} for part in parts if part]
        cached = {"prompt_tokens_details": {"cached_tokens": len(body["prompt"]) - 1}}
        events.append({"choices": [], "usage": cached})
        self._answer(
            "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        )

    def _answer(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def port() -> Iterator[int]:
    Handler.seen = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_turn_is_read_from_the_stream(port: int) -> None:
    turn = run_turn(port, "plan", [7, 8], 3)
    assert turn.token_ids == (9, 10, 11)
    assert (turn.prompt_tokens, turn.cached_tokens) == (2, 1)
    assert 0 < turn.ttft_s <= turn.latency_s


@pytest.mark.parametrize(("model", "named"), [("nobody", "404"), ("lazy", "got 1 tokens")])
def test_an_answer_that_is_not_what_was_asked_is_an_error(
    port: int, model: str, named: str
) -> None:
    with pytest.raises(TurnError, match=named):
        run_turn(port, model, [7, 8], 3)


def test_the_turns_of_a_trajectory_build_on_each_other(port: int) -> None:
    server = ServedModel(port)
    played = play(server, Load(TRACE, qps=1000.0, trajectories=2, vocab_size=50), seed=3)
    assert [len(turns) for turns in played.trajectories] == [2, 2]
    assert played.peak_blocks in (0, 50)
    prompts = [body["prompt"] for body in Handler.seen]
    assert sorted(map(len, prompts)) == [5, 5, 10, 10]
    for long in (prompt for prompt in prompts if len(prompt) == 10):
        (start,) = (p for p in prompts if p == long[:5])
        assert long[5:8] == [start[-1] + 1, start[-1] + 2, start[-1] + 3]
    assert prompts[0] != prompts[1]


def test_a_failing_trajectory_fails_the_play(port: int) -> None:
    server = ServedModel(port)
    trace = Trace((Step("nobody", 5, 3),))
    with pytest.raises(TurnError):
        play(server, Load(trace, qps=10.0, trajectories=1, vocab_size=50), seed=0)


def test_trajectories_arrive_at_the_rate_that_is_asked_for() -> None:
    starts = Load(TRACE, qps=4.0, trajectories=2000, vocab_size=50).starts(seed=1)
    assert starts[0] == 0.0
    assert starts == sorted(starts)
    # two turns each: half as many trajectories as requests
    assert 2000 / starts[-1] == pytest.approx(2.0, rel=0.1)
    assert starts != Load(TRACE, qps=4.0, trajectories=2000, vocab_size=50).starts(seed=2)


def turn(ttft_s: float, latency_s: float, output: int, cached: int = 0) -> Turn:
    return Turn(tuple(range(output)), ttft_s, latency_s, 32, cached)


def test_the_figures_are_those_of_the_turns() -> None:
    def played(scale: float, cached: int) -> Play:
        turns = [turn(scale, 3 * scale, 3, cached), turn(2 * scale, 2 * scale, 1, cached)]
        return Play([turns], peak_blocks=7)

    rows = summarise(
        {(STOCK, 1.0): [played(2.0, 0)], ("prelrshared", 1.0): [played(0.5, 32)]}, TRACE
    )
    stock, ours = rows
    assert stock.throughput_ratio is not None
    assert stock.throughput_ratio.median == 1.0
    assert ours.requests == 2
    assert ours.trajectory_latency_p50_s == 2.5
    assert ours.tokens_per_s == pytest.approx(TRACE.tokens / 2.5)
    assert ours.decode_ms_per_token == pytest.approx(500)
    assert ours.throughput_ratio is not None
    assert ours.throughput_ratio.median == pytest.approx(4.0)
    assert ours.ttft_ratio is not None
    assert ours.ttft_ratio.median == pytest.approx(0.25)
    assert stock.kv_blocks_filled == pytest.approx((2 * 32 + 2) / 32)
    assert ours.kv_blocks_filled == pytest.approx(2 / 32)
    assert ours.peak_kv_blocks == 7


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": ("baseshared",)},
        {"rows": ()},
        {"qps": (0.0,)},
        {"qps": ()},
        {"chunk": 0},
        {"trajectories": 0},
        {"cache_memory": "much"},
    ],
    ids=str,
)
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ServingConfig(**wrong)


def test_without_vllm_the_command_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert main(["bench", "serving", "--qps", "1"]) == 2
    assert "docs/vllm.md" in capsys.readouterr().err
