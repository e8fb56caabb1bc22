"""O2-O4 and O1 over HTTP: what the cache gives is what a cold run gives, and the answer says what was reused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.server.conftest import AGENTS, Serve, relaycaching
from tests.server.live import LiveServer

PROMPT = "the same question as before"


def logprobs(server: LiveServer, prompt: object, model: str = "plan", n: int = 3) -> list[float]:
    answer = server.complete(model, prompt, max_tokens=n, logprobs=0)
    found: list[float] = answer.choices[0].logprobs.token_logprobs
    return found


def close(a: list[float], b: list[float]) -> bool:
    return all(math.isclose(x, y, abs_tol=1e-4) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("extra", ["x", " and more"])
def test_new_tokens_on_cached_ones_equal_a_cold_run(server: LiveServer, extra: str) -> None:
    cold = logprobs(server, PROMPT + extra)
    server.engine.reset()
    server.complete(prompt=PROMPT)
    warm = server.complete(prompt=PROMPT + extra, max_tokens=3, logprobs=0)
    assert warm.usage.prompt_tokens_details.cached_tokens >= len(PROMPT)
    assert close(cold, warm.choices[0].logprobs.token_logprobs)


def test_the_same_request_twice_runs_one_token(server: LiveServer) -> None:
    first = server.complete(prompt=PROMPT, max_tokens=3, logprobs=0)
    again = server.complete(prompt=PROMPT, max_tokens=3, logprobs=0)
    usage = again.usage
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1
    assert again.choices[0].text == first.choices[0].text
    assert close(first.choices[0].logprobs.token_logprobs, again.choices[0].logprobs.token_logprobs)
    (session,) = server.http.get("/v1/sessions").json()["sessions"]
    assert session["length"] == len(PROMPT) + 2  # the last token said was never run


def test_what_is_cached_does_not_change_with_those_who_read_it(server: LiveServer) -> None:
    cold = logprobs(server, PROMPT)
    for text in ("A", "B", "C"):
        logprobs(server, PROMPT + text)
    assert close(cold, logprobs(server, PROMPT))


def test_what_another_agent_wrote_is_reused_and_said(server: LiveServer) -> None:
    server.complete("plan", PROMPT, max_tokens=1)
    details = server.complete("action", PROMPT, max_tokens=1).usage.prompt_tokens_details
    assert details.cached_tokens == details.shared_tokens == len(PROMPT) - 1
    assert 'precache:shared_tokens_total{model_name="action"}' in server.http.get("/metrics").text


def test_agents_that_share_nothing_equal_cold_runs(serve: Serve) -> None:
    with serve(policy="nonshared") as server:
        cold = {}
        for agent in AGENTS:
            cold[agent] = logprobs(server, PROMPT, agent)
            server.engine.reset()
        for agent in AGENTS:
            details = server.complete(agent, PROMPT, max_tokens=1).usage.prompt_tokens_details
            assert details.cached_tokens == 0
        for agent in AGENTS:
            assert close(cold[agent], logprobs(server, PROMPT, agent))
        assert server.http.get("/v1/sessions").json()["stats"]["lookups"]["hit"] == len(AGENTS)


def test_misses_are_counted_by_reason(server: LiveServer) -> None:
    before = server.engine.stats().lookups

    def new() -> dict[str, int]:
        now = server.http.get("/v1/sessions").json()["stats"]["lookups"]
        return {k: n - before.get(k, 0) for k, n in now.items() if n != before.get(k, 0)}

    server.complete(prompt=PROMPT)
    server.complete(prompt=PROMPT[:7] + "QQ")  # seven tokens are enough for a hit
    server.complete(prompt="Z" + PROMPT)
    server.complete(prompt="Q")
    assert new() == {"cold": 1, "hit": 1, "diverged": 1, "too_short": 1}
    text = server.http.get("/metrics").text
    assert all(f'precache:lookups_total{{reason="{reason}"}}' in text for reason in new())


def test_evictions_are_counted_and_the_budget_holds(serve: Serve) -> None:
    with serve(cache_memory="400KB") as server:
        prompts = [letter * 100 for letter in "abc"]
        for prompt in (*prompts, prompts[0]):
            server.complete(prompt=prompt)
        stats = server.http.get("/v1/sessions").json()["stats"]
        assert stats["evictions"] >= 1
        assert stats["lookups"]["evicted"] >= 1
        assert stats["peak_bytes"] <= stats["budget"]


def test_parts_add_up_to_the_bytes_held(server: LiveServer) -> None:
    server.complete(prompt=PROMPT)
    state = server.http.get("/v1/sessions").json()
    assert set(state["parts"]) == {"base", "strip plan", "strip action", "strip reflect"}
    assert sum(state["parts"].values()) == state["stats"]["bytes_held"]


def test_hidden_states_are_a_part_of_their_own(serve: Serve, tmp_path: Path) -> None:
    with serve(**relaycaching(tmp_path)) as server:
        server.complete(prompt=PROMPT)
        state = server.http.get("/v1/sessions").json()
        assert set(state["parts"]) == {"base", "hidden states"}
        assert state["parts"]["hidden states"] > 0
        assert sum(state["parts"].values()) == state["stats"]["bytes_held"]
        (session,) = state["sessions"]
        readers = {strip["kind"]: strip["readers"] for strip in session["strips"]}
        assert readers["hidden states"] == []
        assert readers["strip"] != []
        text = server.http.get("/metrics").text
        assert 'precache:cache_part_bytes{part="hidden states"}' in text


def test_a_prompt_that_cannot_be_shared_is_named(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    history = "".join(f"Observation {i}: it is {i * i}. " for i in range(6))

    def cached(agent: str, *, role_first: bool) -> int:
        role = f"You are {agent}."
        parts = [role, history] if role_first else [history, role]
        messages = [{"role": "user", "content": text} for text in parts]
        usage = server.chat(agent, messages=messages, max_tokens=1).usage
        return int(usage.prompt_tokens_details.cached_tokens)

    def hints() -> list[dict[str, object]]:
        found: list[dict[str, object]] = server.http.get("/v1/live").json()["hints"]
        return found

    with serve() as server:
        cached("plan", role_first=True)
        assert cached("action", role_first=True) < 20
        (hint,) = hints()
        assert {hint["first_model"], hint["second_model"]} == {"plan", "action"}
        assert int(str(hint["position"])) < 20
        assert (str(hint["first"])[:1], str(hint["second"])[:1]) == ("p", "a")
        assert any("cannot share" in record.message for record in caplog.records)
        cached("plan", role_first=False)
        before = hints()
        assert cached("action", role_first=False) >= len(history)
        assert hints() == before
