"""Both ends real: episodes over HTTP against `precache serve`'s app, on a port, with a tiny model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from precache import GenerationChunk
from precache.agents import EndpointError, EngineClient, Episode, HttpClient
from precache.agents.forced import replay
from precache.cli.main import main
from precache.server import ServerSettings
from tests.agents.fakes import TALK, num_shared
from tests.reference.lora import make_adapter
from tests.reference.models import save_tiny
from tests.server.live import LiveServer, ScriptedEngine

ROLES = ("plan", "action")
KEY = "a-key-for-agents"
WORKFLOW = """
name: pair
header: "Task: {question}\\n"
start: think
turns:
  think: {role: plan, cue: "P{step}:", writes: answer, max_tokens: 4, next: act}
  act: {role: action, cue: "A{step}:", max_tokens: 4, next: end}
"""


class ListeningEngine(ScriptedEngine):
    """Keeps the prompts that it was asked."""

    prompts: list[tuple[int, ...]]

    def stream(self, agent: str, prompt: Any, **options: Any) -> Iterator[GenerationChunk]:
        self.prompts.append(tuple(prompt) if not isinstance(prompt, str) else ())
        return super().stream(agent, prompt, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("over_http")
    save_tiny("llama", folder / "model")
    for seed, role in enumerate(ROLES):
        make_adapter(folder / "model", folder / role, seed=seed)
    (folder / "pair.yaml").write_text(WORKFLOW)
    rows = [{"id": n, "question": f"Say {n}.", "answer": str(n)} for n in range(3)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def serve(folder: Path, policy: str = "prelrshared", **settings: Any) -> LiveServer:
    adapters = {role: folder / role for role in ROLES}
    engine = ListeningEngine.load(
        str(folder / "model"), adapters=adapters, policy=policy, dtype="float32"
    )
    assert isinstance(engine, ListeningEngine)
    engine.prompts = []
    return LiveServer(engine, ServerSettings(base_name="tiny", **settings))


def prompts_of(server: LiveServer) -> list[tuple[int, ...]]:
    assert isinstance(server.engine, ListeningEngine)
    return server.engine.prompts


def client_of(server: LiveServer, key: str = "none") -> HttpClient:
    return HttpClient(f"{server.url}/v1", api_key=key, timeout_s=30)


def talk(client: HttpClient | EngineClient) -> Episode:
    return Episode(TALK, client, "q", {"question": "of a fox"}, {})


def test_roles_reuse_each_others_prefix_to_within_the_cue(folder: Path) -> None:
    with serve(folder) as server:
        episode = talk(client_of(server))
        turns = list(episode.play())
        prompts = prompts_of(server)[:]
        server.engine.reset()
        in_process = talk(EngineClient(server.engine))
        assert len(list(in_process.play())) == 6
    assert episode.text == in_process.text
    assert [turn.role for turn in turns] == [*ROLES] * 3
    assert len(prompts) == 6
    for number, (old, new) in enumerate(zip(prompts, prompts[1:], strict=False)):
        written = turns[number].text
        usage = turns[number + 1].usage
        assert usage is not None
        assert usage.prompt_tokens == len(new)
        assert num_shared(old, new) == len(old)
        assert usage.cached_tokens >= len(old)
        if written.isascii() and len(new) - len(old) == len(f"{written}\nA 1:"):
            # A token is a byte. What is new: the cue, and the last token said, which was never run.
            assert len(new) - usage.cached_tokens <= len("\nA 1:") + 1
    assert turns[1].usage is not None
    assert turns[1].usage.cached_tokens >= len(prompts[0])


def test_without_sharing_another_role_reuses_nothing(folder: Path) -> None:
    with serve(folder, policy="nonshared") as server:
        first, second, third, *_ = talk(client_of(server)).play()
    cached = [turn.usage.cached_tokens for turn in (first, second, third) if turn.usage]
    assert [number > 0 for number in cached] == [False, False, True]


def test_forced_mode_leaves_the_recorded_words_in_the_servers_cache(folder: Path) -> None:
    with serve(folder) as server:
        episode = talk(client_of(server))
        turns = list(episode.play())
        server.engine.reset()
        forced = list(replay(client_of(server), TALK, episode.record.trajectory))
        (session,) = server.http.get("/v1/sessions").json()["sessions"]
    assert [turn.role for turn in forced] == [turn.role for turn in turns]
    assert session["length"] >= len(prompts_of(server)[-1]) - 1
    assert {writer["name"] for writer in session["writers"]} == set(ROLES)


def test_a_key_is_asked_for_and_accepted(folder: Path) -> None:
    with serve(folder, api_keys=(KEY,)) as server:
        with pytest.raises(EndpointError, match="answered 401 for plan: a valid API key is needed"):
            list(talk(client_of(server)).play())
        assert len(list(talk(client_of(server, KEY)).play())) == 6


def test_a_name_that_is_not_served_ends_the_run_and_names_those_that_are(folder: Path) -> None:
    with serve(folder) as server:
        client = HttpClient(f"{server.url}/v1", models={"plan": "planner"})
        with pytest.raises(EndpointError, match=r"'planner' does not exist; served are \['tiny'"):
            list(talk(client).play())


@pytest.mark.parametrize("token", [1, 2])
def test_an_answer_that_breaks_off_is_no_turn(token: int, folder: Path) -> None:
    with serve(folder) as server:
        episode = talk(client_of(server))
        play = episode.play()
        next(play)
        server.engine.fail_at = token
        with pytest.raises(EndpointError, match="action"):
            next(play)
    assert len(episode.record.turns) == 1


def test_a_run_goes_on_after_its_server_came_back(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second episode breaks in mid-answer: the error says so, and only what is missing is played again."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    out = folder / "out.jsonl"

    def run(server: LiveServer) -> int:
        options = ["--base-url", f"{server.url}/v1", "--policy", "prelrshared"]
        data = ["--data", str(folder / "tasks.jsonl"), "--out", str(out), "--json"]
        return main(["agents", str(folder / "pair.yaml"), *data, *options])

    with serve(folder, api_keys=(KEY,)) as server:
        broken = _break_at(server, turn=4)
        assert run(server) == 2
        assert broken == [4]
    error = capsys.readouterr().err
    assert "broke off an answer of action" in error
    assert f"1 finished episodes are in {out}" in error
    with serve(folder, api_keys=(KEY,)) as server:
        assert run(server) == 0
        assert len(prompts_of(server)) == 4
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert (row["episodes"], row["outcomes"]) == (3, {"accepted": 3})
    assert row["cached_share"] > 0


def _break_at(server: LiveServer, turn: int) -> list[int]:
    """Let the server fail in the middle of that turn's answer; the list says that it did."""
    done: list[int] = []
    stream = server.engine.stream

    def stopping(agent: str, prompt: Any, **options: Any) -> Iterator[GenerationChunk]:
        chunks = stream(agent, prompt, **options)
        if len(prompts_of(server)) != turn:
            yield from chunks
            return
        yield next(chunks)
        done.append(turn)
        raise RuntimeError("an injected fault")

    server.engine.stream = stopping  # type: ignore[method-assign]
    return done
