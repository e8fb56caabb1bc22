"""One turn at a time, first come first served; what is too much, too slow or no longer wanted ends."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from precache.server.errors import ApiError, OverloadedError
from precache.server.queue import Ticket, TurnQueue
from tests.server.conftest import Serve
from tests.server.live import LiveServer


def wait_for(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def errors(server: LiveServer) -> dict[tuple[str, str], float]:
    """The error answers that /metrics counts, by status and reason."""
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    return {
        (sample.labels["status"], sample.labels["reason"]): sample.value
        for family in families
        for sample in family.samples
        if sample.name == "precache:error_answers_total"
    }


def counting(until: int, log: list[int] | None = None):  # type: ignore[no-untyped-def]
    def work(cancel: threading.Event) -> Generator[int, None, None]:
        for number in range(until):
            if log is not None:
                log.append(number)
            yield number
            cancel.wait(0.005)

    return work


async def collect(ticket: Ticket[int]) -> list[int]:
    return [event async for event in ticket]


def test_tickets_run_in_order_and_one_at_a_time() -> None:
    log: list[int] = []

    async def scenario() -> list[list[int]]:
        queue = TurnQueue(10)
        tickets = [queue.submit(counting(3, log), 10) for _ in range(3)]
        answers = [await collect(ticket) for ticket in tickets]
        queue.close()
        return answers

    assert asyncio.run(scenario()) == [[0, 1, 2]] * 3
    assert log == [0, 1, 2] * 3


def test_a_full_queue_refuses_and_says_when_to_come_again() -> None:
    async def scenario() -> None:
        queue = TurnQueue(1)
        first = queue.submit(counting(1000), 10)
        await anext(first)
        queue.submit(counting(1), 10)
        with pytest.raises(OverloadedError) as refused:
            queue.submit(counting(1), 10)
        assert int(refused.value.headers["Retry-After"]) >= 1
        queue.close()
        queue.abort()

    asyncio.run(scenario())


def test_a_ticket_that_takes_too_long_ends() -> None:
    async def scenario() -> None:
        queue = TurnQueue(1)
        log: list[int] = []
        ticket = queue.submit(counting(10_000, log), 0.1)
        with pytest.raises(ApiError, match=r"longer than 0\.1 s"):
            await collect(ticket)
        assert await collect(queue.submit(counting(2), 10)) == [0, 1]
        assert len(log) < 100
        queue.close()

    asyncio.run(scenario())


def test_a_waiting_ticket_that_is_cancelled_never_runs() -> None:
    async def scenario() -> None:
        queue, log = TurnQueue(5), list[int]()
        running = queue.submit(counting(20), 10)
        waiting = queue.submit(counting(3, log), 10)
        waiting.cancel(ApiError(400, "not wanted"))
        await collect(running)
        assert await collect(queue.submit(counting(1), 10)) == [0]
        assert log == []
        assert queue.waiting == 0
        queue.close()

    asyncio.run(scenario())


def test_a_full_server_answers_503(serve: Serve) -> None:
    with serve({"max_queue": 0}) as server, server.engine.slow(0.05):
        stream = server.complete(stream=True, max_tokens=50)
        next(iter(stream))
        with pytest.raises(openai.InternalServerError) as refused:
            server.complete()
        assert refused.value.status_code == 503
        assert int(refused.value.response.headers["Retry-After"]) >= 1
        assert errors(server) == {("503", "queue_full"): 1}
        stream.close()


def test_a_slow_request_is_timed_out_and_the_next_one_works(serve: Serve) -> None:
    with serve({"request_timeout_s": 0.4}) as server:
        with server.engine.slow(0.05), pytest.raises(openai.InternalServerError) as late:
            server.complete(max_tokens=100)
        assert late.value.status_code == 504
        assert errors(server) == {("504", "request_timeout"): 1}
        assert server.complete().usage.completion_tokens == 4


def test_a_request_that_waits_too_long_is_counted_though_it_never_was_a_turn(serve: Serve) -> None:
    with (
        serve({"request_timeout_s": 0.4}) as server,
        server.engine.slow(3),  # a token outlasts the limit of both requests
        ThreadPoolExecutor() as pool,
    ):
        running = pool.submit(server.complete)
        wait_for(lambda: server.service.queue.running is not None)
        with pytest.raises(openai.InternalServerError):
            server.complete()
        with pytest.raises(openai.InternalServerError):
            running.result()
        assert errors(server) == {("504", "request_timeout"): 2}
        assert len(server.service.monitor.turns()) == 1


def test_refusals_are_counted_by_status_and_reason(serve: Serve) -> None:
    with serve({"api_keys": ("an-api-key",)}) as server:
        server.http.get("/")
        server.http.headers["Authorization"] = "Bearer an-api-key"
        server.post("/v1/completions", model="nobody", prompt="a")
        server.post("/v1/completions", model="plan", prompt="a", n=0)
        server.post("/v1/completions", model="plan", prompt="a" * 1000)
        server.post("/v1/completions", model="plan", prompt="a" * (5 * 2**20))
        for name in ("one", "two"):
            server.http.get(f"/v1/{name}")
        assert errors(server) == {
            ("401", "invalid_api_key"): 1,
            ("404", "model_not_found"): 1,
            ("400", "invalid_request_error"): 1,
            ("400", "context_length_exceeded"): 1,
            ("413", "invalid_request_error"): 1,
            ("404", "invalid_request_error"): 2,
        }


def test_a_fault_of_ours_is_counted_once(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve() as server:
        monkeypatch.setattr(type(server.service), "models", property(lambda _: 1 / 0))
        # In a connection of its own, which uvicorn closes after this.
        assert httpx.get(f"{server.url}/v1/models").status_code == 500
        assert errors(server) == {("500", "internal"): 1}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_turn(
    server: LiveServer, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    queue, expected = server.service.queue, server.complete(max_tokens=30).choices[0].text
    with server.engine.slow(0.05):
        if stream:
            answer = server.complete(stream=True, max_tokens=150)
            next(iter(answer))
            answer.close()
        else:
            with pytest.raises(openai.APITimeoutError):
                server.complete(max_tokens=150, timeout=0.5)
        wait_for(lambda: queue.running is None)
    left = server.service.monitor.turns()[-1]
    assert left["state"] == "failed"
    assert left["completion_tokens"] < 150  # type: ignore[operator]
    assert server.complete(max_tokens=30).choices[0].text == expected
    assert not [record for record in caplog.records if record.exc_info]  # it is nobody's failure


def test_a_turn_is_cancelled_between_the_chunks_of_its_prompt(serve: Serve) -> None:
    with serve(prefill_chunk=1) as server:
        with pytest.raises(openai.APITimeoutError):
            server.complete(prompt=[20] * 250, max_tokens=1, timeout=0.1)
        wait_for(lambda: server.service.queue.running is None)
        (session,) = server.http.get("/v1/sessions").json()["sessions"] or [{"length": 0}]
        assert session["length"] < 250


def test_neutral_passes_run_between_requests(serve: Serve) -> None:
    options = {"policy": "rebaseshared", "schedule": "idle-lazy-prefill"}
    with serve(**options) as server:
        server.complete("plan", "a history")

        def pending() -> int:
            sessions = server.http.get("/v1/sessions").json()["sessions"]
            return sum(session["pending_tokens"] for session in sessions)

        wait_for(lambda: pending() == 0)
        assert server.http.get("/v1/sessions").json()["stats"]["neutral_tokens"] == 12
        assert "precache:neutral_tokens_total 12.0" in server.http.get("/metrics").text
        assert (
            server.complete("action", "a history of").usage.prompt_tokens_details.cached_tokens == 9
        )
