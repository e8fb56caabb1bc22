"""`calibrated`: PreLRShared with fitted columns, against the reference; what it leaves exact; files that do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from precache.errors import CacheFileError, ConfigError, PolicyNotAllowedError
from tests.engine.setup import AGENTS, Setup
from tests.engine.trajectories import (
    NOTICEABLE,
    REUSED,
    STEPS,
    TOLERANCE,
    Step,
    answer,
    difference,
    only_trajectory,
    other_than,
    play_engine,
    play_reference,
    stored,
    stored_difference,
    tokens,
)
from tests.reference.lora import read_adapter

RANK, HIDDEN, WIDTH = 3, 64, 32
CORRECTED = (1, 2, 3)  # layers


def write(
    setup: Setup, path: Path, label: str = "qv", scale: float = 0.3, **changes: object
) -> Path:
    """A calibration with strong random corrections."""
    generator = torch.Generator().manual_seed(4)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * shape[0] ** -0.5

    tensors = {}
    for layer in CORRECTED:
        for reader in AGENTS:
            tensors[f"q_k.{layer}.{reader}"] = draw(RANK, WIDTH) * scale
            tensors[f"q_v.{layer}.{reader}"] = draw(RANK, WIDTH) * scale
            for writer in ("base", *AGENTS):
                if writer != reader:
                    tensors[f"p.{layer}.{writer}.{reader}"] = draw(HIDDEN, RANK)
    save(setup, path, tensors, label, **changes)
    return path


def save(
    setup: Setup, path: Path, tensors: dict[str, Tensor], label: str = "qv", **changes: object
) -> None:
    engine = setup.engine("nonshared", adapters=setup.adapters(label))
    facts = {
        "format": "precache-calibration-1",
        "policy": "calibrated",
        "model": engine.model.digest(),
        "rank": RANK,
        "adapters": {adapter.name: adapter.digest for adapter in engine.bank},
    }
    save_file(tensors, path, {"precache": json.dumps(facts | changes)})


@pytest.fixture(scope="module")
def fitted(llama: Setup, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(llama, tmp_path_factory.mktemp("calibration") / "c")


@pytest.mark.parametrize("chunk", [512, 3])
@pytest.mark.parametrize("label", ["qv", "qkvo", "mixed", "some_layers"])
def test_logits_and_caches_follow_the_definition(
    llama: Setup, tmp_path: Path, label: str, chunk: int
) -> None:
    file, adapters = write(llama, tmp_path / "c", label), llama.adapters(label)
    engine = llama.engine("calibrated", None, adapters, calibration=file, prefill_chunk=chunk)
    played = play_engine(engine)
    state = llama.reference("calibrated", adapters, file=file)
    assert difference(played.logits, play_reference(state)) < TOLERANCE
    assert difference(played.logits, llama.expected("prelrshared", label)) > NOTICEABLE
    assert played.cached == REUSED


def test_a_prompt_that_turns_off_and_a_new_token_follow_the_definition(
    llama: Setup, fitted: Path
) -> None:
    state = llama.reference("calibrated", file=fitted)
    play_reference(state)
    state.truncate(19)
    engine = llama.engine("calibrated", calibration=fitted)
    ids = play_engine(engine).token_ids
    prompt = [*ids[:19], other_than(ids[19])]
    for agent, output in (("action", tokens(3, seed=6)), ("plan", tokens(1, seed=7))):
        logits = engine.score(agent, prompt, output)
        assert difference([logits], [answer(state, agent, prompt, output)]) < TOLERANCE
        prompt = [*prompt, *output, 30]
    assert engine.stats().reused_tokens > sum(REUSED) + 19


def test_an_agent_alone_is_exact(llama: Setup, fitted: Path) -> None:
    steps = tuple(Step("plan", step.prompt, step.output) for step in STEPS)
    played = play_engine(llama.engine("calibrated", calibration=fitted), steps)
    assert difference(played.logits, llama.expected("nonshared", steps=steps)) < TOLERANCE
    assert played.cached == REUSED


def test_corrections_of_nothing_are_prelrshared(llama: Setup, tmp_path: Path) -> None:
    file = write(llama, tmp_path / "c", scale=0.0)
    played = play_engine(llama.engine("calibrated", calibration=file))
    assert difference(played.logits, llama.expected("prelrshared")) < TOLERANCE


def test_an_adapter_that_comes_later_is_caught_up_without_corrections(
    llama: Setup, fitted: Path
) -> None:
    early = {name: path for name, path in llama.adapters().items() if name != "reflect"}
    state = llama.reference("calibrated", early, file=fitted)
    play_reference(state, STEPS[:2])
    engine = llama.engine("calibrated", None, early, calibration=fitted)
    prompt = [*play_engine(engine, STEPS[:2]).token_ids, 30]
    engine.add_adapter("reflect", llama.adapters()["reflect"])
    state.add_adapter("reflect", read_adapter(llama.adapters()["reflect"]))
    for agent in ("reflect", "plan", "reflect"):
        logits = engine.score(agent, prompt, tokens(2))
        assert difference([logits], [answer(state, agent, prompt, tokens(2))]) < TOLERANCE
        prompt = [*prompt, *tokens(2), 31]
    assert engine.stats().bytes_held == only_trajectory(engine).bytes_held()


def test_a_session_is_saved_with_its_corrections(
    llama: Setup, fitted: Path, tmp_path: Path
) -> None:
    engine = llama.engine("calibrated", calibration=fitted)
    prompt = [*play_engine(engine).token_ids, 30]
    engine.save_session("session-1", tmp_path / "s")
    before = stored(engine, only_trajectory(engine))
    expected = engine.score("reflect", prompt, tokens(2))
    again = llama.engine("calibrated", calibration=fitted)
    again.load_session(tmp_path / "s")
    assert stored_difference(stored(again, only_trajectory(again)), before) == 0
    assert torch.equal(again.score("reflect", prompt, tokens(2)), expected)
    other = llama.engine("calibrated", calibration=write(llama, tmp_path / "c", scale=0.1))
    with pytest.raises(CacheFileError, match="policy is 'calibrated"):
        other.load_session(tmp_path / "s")


def test_columns_are_counted_in_bytes_and_in_flops(llama: Setup, fitted: Path) -> None:
    plain, engine = llama.engine("prelrshared"), llama.engine("calibrated", calibration=fitted)
    for each in (plain, engine):
        each.score("plan", tokens(20), tokens(1))
    rows, float32 = 64, 4
    columns = 2 * RANK * len(CORRECTED) * len(AGENTS)  # for v and for k
    assert engine.stats().bytes_held - plain.stats().bytes_held == rows * columns * float32
    assert engine.stats().flops > plain.stats().flops


# -- what does not fit ---------------------------------------------------------------------------------------------


def test_without_a_calibration_of_these_adapters_the_policy_is_refused(
    llama: Setup, fitted: Path
) -> None:
    with pytest.raises(PolicyNotAllowedError, match="it needs a calibration"):
        llama.engine("calibrated")
    other = llama.adapters() | {"plan": llama.other_adapter()}
    with pytest.raises(PolicyNotAllowedError, match="fitted to other weights.*'plan'"):
        llama.engine("calibrated", None, other, calibration=fitted)
    more = llama.adapters() | {"critic": llama.other_adapter()}
    with pytest.raises(PolicyNotAllowedError, match="fitted to adapters .*'critic'"):
        llama.engine("calibrated", None, more, calibration=fitted)
    engine = llama.engine("calibrated", calibration=fitted)
    with pytest.raises(PolicyNotAllowedError, match="other weights"):
        engine.replace_adapter("plan", llama.other_adapter())


def test_a_calibration_of_another_model_is_refused(
    llama: Setup, setup_of: Callable[[str], Setup], fitted: Path
) -> None:
    with pytest.raises(ConfigError, match="of another model"):
        setup_of("mistral").engine("calibrated", adapters={}, calibration=fitted)


def without(name: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.pop(name)


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.update({name: change(tensors[name])})


SPOILED: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "q_k and q_v": without("q_k.1.plan"),
    ": p: ": without("p.2.base.action"),
    "p.1.plan.action: .*NaN": changed("p.1.plan.action", lambda held: held * torch.nan),
    "p.1.plan.action: .*float32": changed("p.1.plan.action", lambda held: held.half()),
    r"q_v.1.plan: .*\[3, 32\]": changed("q_v.1.plan", lambda held: held[:2].clone()),
    "a tensor: .*p.1.plan.nobody": lambda held: held.update(
        {"p.1.plan.nobody": held["p.1.plan.action"].clone()}
    ),
    "q_k.9.plan: .*layers 0 to 3": lambda held: held.update(
        {f"{q}.9.plan": held["q_k.1.plan"].clone() for q in ("q_k", "q_v")}
    ),
}


@pytest.mark.parametrize("match", SPOILED)
def test_tensors_that_do_not_fit_are_refused_by_name(
    llama: Setup, tmp_path: Path, match: str
) -> None:
    path = write(llama, tmp_path / "c")
    tensors = load_file(path)
    SPOILED[match](tensors)
    save(llama, path, tensors)
    with pytest.raises(ConfigError, match=match):
        llama.engine("calibrated", calibration=path)


@pytest.mark.parametrize(
    ("match", "changes"),
    [
        ("format", {"format": "x"}),
        ("rank", {"rank": 0}),
        ("rank", {"rank": 4000}),
        ("adapters", {"adapters": [1]}),
        ("metadata", {"more": 1}),
    ],
)
def test_facts_that_do_not_fit_are_refused_by_name(
    llama: Setup, tmp_path: Path, match: str, changes: dict[str, object]
) -> None:
    path = write(llama, tmp_path / "c", **changes)
    with pytest.raises(ConfigError, match=match):
        llama.engine("calibrated", calibration=path)


def test_a_file_that_is_no_calibration_is_refused(llama: Setup, tmp_path: Path) -> None:
    (tmp_path / "c").write_bytes(b"no")
    for path in (tmp_path / "c", tmp_path / "none", Path(llama.model) / "model.safetensors"):
        with pytest.raises(ConfigError, match="calibration"):
            llama.engine("calibrated", calibration=path)
