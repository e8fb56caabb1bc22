"""Sessions that are saved and loaded: the next turn cannot tell, and a file that does not fit is refused unread."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from precache import Engine
from precache.errors import CacheBudgetError, CacheFileError, UnknownSessionError
from tests.engine.setup import Setup
from tests.engine.trajectories import (
    METHODS,
    SHARED_METHODS,
    STEPS,
    TOLERANCE,
    answer,
    difference,
    play_engine,
    play_reference,
    stored,
    stored_difference,
    tokens,
)


@pytest.mark.parametrize("label", ["qkvo", "mixed"])
@pytest.mark.parametrize(("policy", "schedule"), SHARED_METHODS)
def test_after_a_round_trip_the_next_turn_is_the_same(
    llama: Setup, tmp_path: Path, policy: str, schedule: str | None, label: str
) -> None:
    path, adapters = tmp_path / "s.safetensors", llama.adapters(label)
    with llama.engine(policy, schedule, adapters) as engine, engine.no_idle_work():
        prompt = [*play_engine(engine).token_ids, *tokens(3, seed=2)]
        engine.save_session(engine.sessions()[0].session_id, path)
        before = stored(engine, engine.store.trajectories[0])
        expected = engine.score("reflect", prompt, tokens(3))
        hit = engine.stats().reused_tokens
    with llama.engine(policy, schedule, adapters) as engine:
        session_id = engine.load_session(path)
        assert stored_difference(stored(engine, engine.store.get(session_id)), before) == 0
        logits = engine.score("reflect", prompt, tokens(3))
        assert torch.equal(logits, expected)
        assert engine.stats().reused_tokens == 56 <= hit
        (session,) = engine.sessions()
        assert [run.writer.name for run in session.writers][:3] == ["plan", "action", "reflect"]


def test_each_agent_of_nonshared_saves_its_own(llama: Setup, tmp_path: Path) -> None:
    engine = llama.engine("nonshared")
    prompt = [*play_engine(engine).token_ids, *tokens(3)]
    for session in engine.sessions():
        engine.save_session(session.session_id, tmp_path / session.session_id)
    expected = engine.score("action", prompt, tokens(2))
    other = llama.engine("nonshared")
    for path in tmp_path.iterdir():
        other.load_session(path)
    assert torch.equal(other.score("action", prompt, tokens(2)), expected)
    assert other.stats().reused_tokens == 53


@pytest.mark.parametrize(("policy", "schedule"), METHODS)
def test_a_session_saved_in_the_middle_of_a_turn_goes_on_right(
    llama: Setup, tmp_path: Path, policy: str, schedule: str | None
) -> None:
    """The pending state is saved with it: adapted rows are not taken for neutral ones."""
    state, path = llama.reference(policy), tmp_path / "s"
    with llama.engine(policy, schedule) as engine:
        stream = engine.stream("plan", tokens(20), max_tokens=9, ignore_eos=True)
        said = [next(stream).token_ids[0] for _ in range(3)]
        engine.save_session(engine.sessions()[0].session_id, path)
        stream.close()
    prompt = [*tokens(20), *said, *tokens(3, seed=2)]
    agent = "plan" if policy == "nonshared" else "action"
    with llama.engine(policy, schedule) as engine:
        engine.load_session(path)
        deferred = policy == "rebaseshared" and schedule != "double-batch"
        if schedule != "idle-lazy-prefill":  # there it may be done already
            assert engine.sessions()[0].pending_tokens == (22 if deferred else 0)
        logits = engine.score(agent, prompt, tokens(2))
        assert engine.stats().reused_tokens == 22
    answer(state, "plan", tokens(20), said)
    assert difference([logits], [answer(state, agent, prompt, tokens(2))]) < TOLERANCE


def test_a_file_from_before_an_adapter_came_is_caught_up(llama: Setup, tmp_path: Path) -> None:
    early = {name: llama.adapters()[name] for name in ("plan", "action")}
    engine = llama.engine("rebaseshared", adapters=early)
    prompt = [*play_engine(engine, STEPS[:2]).token_ids, *tokens(3)]
    engine.save_session(engine.sessions()[0].session_id, tmp_path / "s")
    later = llama.engine("rebaseshared")
    later.load_session(tmp_path / "s")
    out = later.generate("reflect", prompt, max_tokens=1, logprobs=20)
    assert out.usage.catch_up_tokens == 26
    state = llama.reference("rebaseshared")
    play_reference(state, STEPS[:2])
    expected = torch.log_softmax(answer(state, "reflect", prompt, out.token_ids), -1)[0]
    assert all(abs(value - expected[token]) < TOLERANCE for token, value in out.logprobs[0].top)


def test_rows_that_were_never_computed_are_saved_as_zeros(llama: Setup, tmp_path: Path) -> None:
    """They are whatever the memory held before: not finite, or somebody's data."""
    engine = llama.engine("baseshared")
    engine.score("plan", tokens(20), tokens(2))
    (trajectory,) = engine.store.trajectories
    missing = [strip for strip in trajectory.strips.values() if not strip.covered]
    for part in missing[0].tensors():
        part.fill_(torch.nan)
    engine.save_session("session-1", tmp_path / "s")
    again = llama.engine("baseshared")
    again.load_session(tmp_path / "s")
    out = again.generate("action", tokens(22), max_tokens=1)
    assert out.usage.catch_up_tokens == 20
    assert len(missing) == 2


# -- files that do not fit -----------------------------------------------------------------------------------------

Facts = dict[str, Any]
Tensors = dict[str, Tensor]


def edit(path: Path, change: Callable[[Facts, Tensors], object]) -> None:
    """Change the facts and the tensors of a saved session."""
    with safe_open(str(path), framework="pt") as file:
        facts = json.loads(file.metadata()["precache"])
    tensors = load_file(path)
    change(facts, tensors)
    save_file(tensors, path, {"precache": json.dumps(facts)})


def facts(**changes: object) -> Callable[[Facts, Tensors], object]:
    return lambda held, _: held.update(changes)


def tensor(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Facts, Tensors], object]:
    return lambda _, held: held.update({name: change(held[name])})


def without(name: str) -> Callable[[Facts, Tensors], object]:
    return lambda _, held: held.pop(name)


def filled(value: float, index: int = 3) -> Callable[[Tensor], Tensor]:
    def change(held: Tensor) -> Tensor:
        held.view(-1)[index] = value
        return held

    return change


SPOILED: dict[str, Callable[[Facts, Tensors], object]] = {
    "format": facts(format="precache-session-0"),
    "model": facts(model="0" * 64),
    "policy": facts(policy="fullshared"),
    "namespace": facts(namespace="elsewhere"),
    "namespace ": facts(namespace=["shared"]),
    "metadata": facts(more=1),
    "runs": facts(runs=[[0, 5, "base", ""]]),
    "runs ": facts(runs=5),
    "runs  ": facts(runs=[[0, 10**9, "base", ""]]),
    "runs    ": lambda held, _: held["runs"][0].__setitem__(0, 0.0),
    "adapter 'plan'": lambda held, _: held["runs"][0].__setitem__(3, "0" * 64),
    "pending_from": facts(pending_from=10**6),
    "pending_from ": facts(pending_from=True),
    "pending_from  ": facts(pending_from=-1),
    "pending_from   ": facts(pending_from=0),  # prelrshared has no pass that would run them
    "a strip's adapter": lambda held, _: held["strips"][0].__setitem__(0, "0" * 64),
    "a strip's adapter ": facts(strips=[[["a"], [[0, 3]]]]),
    "a strip's range": lambda held, _: held["strips"][0].__setitem__(1, [[0, 10**6]]),
    "a strip's range ": lambda held, _: held["strips"][0].__setitem__(1, [[5, 3]]),
    "strips": facts(strips=5),
    "strips ": facts(strips=[["a"]]),
    "strips  ": lambda held, _: held["strips"][0].__setitem__(1, [["a", "b"]]),
    "strips   ": lambda held, _: held["strips"][0].__setitem__(1, [[0.5, 3]]),
    "token_ids": tensor("token_ids", filled(128)),
    "token_ids ": tensor("token_ids", filled(-1)),
    "token_ids  ": tensor("token_ids", lambda held: held.float()),
    "token_ids   ": without("token_ids"),
    "runs   ": tensor("token_ids", lambda held: held[:-1].clone()),
    "k.1": tensor("k.1", filled(torch.nan)),
    "v.2": tensor("v.2", filled(torch.inf)),
    "k.2": tensor("k.2", lambda held: held[:, :-1].clone()),
    "v.1": tensor("v.1", lambda held: held.to(torch.bfloat16)),
    "v.3": without("v.3"),
    "strip.0.v.0": tensor("strip.0.v.0", filled(torch.nan)),
    "strip.0.v.1": without("strip.0.v.1"),
}


@pytest.fixture(scope="module")
def saved(llama: Setup, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("saved") / "s"
    engine = llama.engine()
    play_engine(engine)
    engine.save_session(engine.sessions()[0].session_id, path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def busy_engine(llama: Setup) -> Engine:
    engine = llama.engine()
    engine.score("plan", tokens(20), tokens(2))
    return engine


def assert_refused(engine: Engine, path: Path, match: str) -> None:
    sessions, held = engine.sessions(), engine.stats().bytes_held
    with pytest.raises(CacheFileError, match=match):
        engine.load_session(path)
    assert engine.sessions() == sessions
    assert engine.stats().bytes_held == held


@pytest.mark.parametrize("what", SPOILED)
def test_a_file_that_does_not_fit_is_refused_by_name(
    busy_engine: Engine, saved: bytes, tmp_path: Path, what: str
) -> None:
    path = tmp_path / "s"
    path.write_bytes(saved)
    edit(path, SPOILED[what])
    assert_refused(busy_engine, path, f"{what.strip()} is .*, allowed is")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data[:-100],
        lambda data: data[:7],
        lambda data: b"",
        lambda data: b"\xff" * 64 + data[64:],
        lambda data: data.replace(b"precache-session", b"\x00recache-session"),
        lambda data: data.replace(b'"__metadata__"', b'"__matadata__"'),
    ],
    ids=["cut", "7 bytes", "empty", "header", "metadata", "no metadata"],
)
def test_bytes_that_are_no_session_are_refused(
    busy_engine: Engine, saved: bytes, tmp_path: Path, spoil: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "s"
    path.write_bytes(spoil(saved))
    assert_refused(busy_engine, path, "session")


def test_no_file_a_folder_and_other_safetensors_are_refused(
    busy_engine: Engine, llama: Setup, tmp_path: Path
) -> None:
    assert_refused(busy_engine, tmp_path / "none", "cannot be read")
    assert_refused(busy_engine, tmp_path, "cannot be read")
    assert_refused(busy_engine, Path(llama.model) / "model.safetensors", "metadata")


def test_a_file_of_another_model_or_other_adapters_is_refused(
    llama: Setup, setup_of: Any, saved: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "s"
    path.write_bytes(saved)
    assert_refused(setup_of("mistral").engine(), path, "model is .*, allowed is")
    assert_refused(
        llama.engine("baseshared"), path, "policy is 'prelrshared', allowed is 'baseshared'"
    )
    other = llama.adapters() | {"plan": llama.other_adapter()}
    assert_refused(llama.engine(adapters=other), path, "adapter 'plan' is .*, allowed is")
    fewer = {"plan": llama.adapters()["plan"]}
    assert_refused(llama.engine(adapters=fewer), path, "a strip's adapter is")


def test_a_file_that_exceeds_the_budget_is_refused(
    llama: Setup, saved: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "s"
    path.write_bytes(saved)
    engine = llama.engine(cache_memory=40_000)
    with pytest.raises(CacheBudgetError):
        engine.load_session(path)
    assert engine.stats().bytes_held == 0


def test_a_loaded_session_is_not_the_first_to_be_evicted(
    llama: Setup, saved: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "s"
    path.write_bytes(saved)
    engine = llama.engine(cache_memory=170_000)
    old = engine.generate("plan", tokens(30), max_tokens=1).session_id
    loaded = engine.load_session(path)
    engine.generate("plan", [11, *tokens(29, seed=2)], max_tokens=1)
    assert engine.stats().evictions > 0
    ids = {session.session_id for session in engine.sessions()}
    assert loaded in ids
    assert old not in ids


def test_saving_what_is_not_there_or_cannot_be_written_is_refused(
    llama: Setup, tmp_path: Path
) -> None:
    engine = llama.engine()
    engine.score("plan", tokens(20), tokens(2))
    with pytest.raises(UnknownSessionError, match=r"got 'nope', cached are \['session-1'\]"):
        engine.save_session("nope", tmp_path / "s")
    with pytest.raises(CacheFileError, match="cannot be saved"):
        engine.save_session("session-1", tmp_path / "no" / "folder" / "s")
    (tmp_path / "s").mkdir()
    with pytest.raises(CacheFileError, match="cannot be saved"):
        engine.save_session("session-1", tmp_path / "s")
    assert [path.name for path in tmp_path.iterdir()] == ["s"]  # nothing is left beside it
