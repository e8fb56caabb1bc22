"""Corrections: least squares and the best low rank, computed otherwise from the slow reference's states."""

from __future__ import annotations

import json
import runpy
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors import safe_open

from precache.adapters.calibration import load_calibration
from precache.errors import ConfigError
from precache.fidelity.calibrate import Calibration, CalibrationConfig, calibrate
from precache.fidelity.recordings import Recording
from tests.engine.setup import AGENTS, Setup
from tests.engine.trajectories import Step
from tests.fidelity.conftest import recorded
from tests.reference.forward import Network
from tests.reference.lora import AdapterDict, read_adapter

ROOT = Path(__file__).parents[2]
LAYER, READER, WRITERS = 2, "action", ("base", "plan", "reflect")
WIDTH = 32  # of k, and of v: 2 KV heads of 16
Array = NDArray[np.float64]


@pytest.fixture(scope="module")
def texts() -> list[Recording]:
    return [recorded(seed, (Step("plan", 60, 10), Step("action", 40, 9))) for seed in range(3)]


@pytest.fixture(scope="module")
def fitted(setup: Setup, texts: list[Recording]) -> Mapping[int, Calibration]:
    """By rank; hardly any ridge."""
    with setup.engine() as engine:
        return {
            rank: calibrate(engine, texts, CalibrationConfig(rank, ridge=1e-9))
            for rank in (4, 2 * WIDTH)
        }


@pytest.fixture(scope="module")
def data(setup: Setup, texts: list[Recording]) -> Mapping[str, tuple[Array, Array]]:
    """By writer: X, and what the reader misses of k (before RoPE) and v, over all tokens."""
    found: dict[str, list[tuple[Array, Array]]] = {writer: [] for writer in WRITERS}
    for recording in texts:
        own = as_read(setup, recording, READER)
        for writer in WRITERS:
            x, theirs = inputs(setup, recording, writer), as_read(setup, recording, writer)
            found[writer].append((x, own - theirs))
    return {
        writer: (np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts]))
        for writer, parts in found.items()
    }


def adapter_of(setup: Setup, agent: str) -> AdapterDict:
    return {} if agent == "base" else read_adapter(setup.adapters()[agent])


def inputs(setup: Setup, recording: Recording, agent: str) -> Array:
    network, adapter = Network(setup.stock), adapter_of(setup, agent)
    ids = recording.token_ids[: recording.num_run]
    run = network.run(
        ids,
        0,
        adapter,
        lambda layer, x: (network.keys(layer, x, 0, adapter), network.values(layer, x, adapter)),
    )
    return run.inputs[LAYER].double().numpy()


def as_read(setup: Setup, recording: Recording, writer: str) -> Array:
    """W_k x and (W_v + s A B) x with the reader's A and B and the writer's x."""
    x = inputs(setup, recording, writer)
    weights = {name: tensor.double().numpy() for name, tensor in setup.stock.state_dict().items()}
    prefix = f"model.layers.{LAYER}.self_attn"
    a, b, scaling = adapter_of(setup, READER)[LAYER, "v_proj"]
    lora = scaling * x @ a.double().numpy().T @ b.double().numpy().T
    k, v = (x @ weights[f"{prefix}.{name}_proj.weight"].T for name in ("k", "v"))
    return np.concatenate([k, v + lora], axis=1)


def predicted(calibration: Calibration, writer: str, x: Array) -> Array:
    found = calibration.corrections[LAYER, READER]
    q = torch.cat([found.q_k, found.q_v], dim=1).double().numpy()
    return x @ found.p[writer].double().numpy() @ q


def test_at_full_rank_a_correction_is_least_squares(
    fitted: Mapping[int, Calibration], data: Mapping[str, tuple[Array, Array]]
) -> None:
    for writer in WRITERS:
        x, y = data[writer]
        expected = x @ np.linalg.lstsq(x, y, rcond=None)[0]
        ours = predicted(fitted[2 * WIDTH], writer, x)
        assert np.abs(ours - expected).max() < 1e-2 * np.abs(expected).max()
        assert np.square(y - ours).sum() < 0.7 * np.square(y).sum()


def test_a_low_rank_is_the_best_one_for_all_writers_together(
    setup: Setup,
    texts: list[Recording],
    fitted: Mapping[int, Calibration],
    data: Mapping[str, tuple[Array, Array]],
) -> None:
    """Eckart and Young: of the stacked, weighted predictions nothing of rank 4 misses less."""
    own = np.concatenate([as_read(setup, recording, READER) for recording in texts])
    sizes = [np.square(half).mean() for half in (own[:, :WIDTH], own[:, WIDTH:])]
    weight = np.concatenate([np.full(WIDTH, size**-0.5) for size in sizes])
    full, low = (
        np.concatenate([predicted(fitted[rank], writer, data[writer][0]) for writer in WRITERS])
        for rank in (2 * WIDTH, 4)
    )
    singular = np.linalg.svd(full * weight, compute_uv=False)
    missed = np.square((full - low) * weight).sum()
    assert missed == pytest.approx(np.square(singular[4:]).sum(), rel=1e-2)
    assert missed > 0.01 * np.square(singular).sum()


def test_what_is_explained_grows_with_the_rank(fitted: Mapping[int, Calibration]) -> None:
    for key, low in fitted[4].corrections.items():
        high = fitted[2 * WIDTH].corrections[key]
        assert 0 < low.explained < high.explained <= 1.0 + 1e-6


def test_the_file_says_what_it_belongs_to(
    setup: Setup, fitted: Mapping[int, Calibration], tmp_path: Path
) -> None:
    path = tmp_path / "calibration.safetensors"
    with setup.engine() as engine:
        fitted[4].save(path, engine)
        digests = {adapter.name: adapter.digest for adapter in engine.bank}
        model = engine.model.digest()
    with safe_open(str(path), framework="pt") as file:
        facts = json.loads(file.metadata()["precache"])
        shapes = {name: tuple(file.get_tensor(name).shape) for name in file.keys()}  # noqa: SIM118
    assert facts == {
        "format": "precache-calibration-1",
        "policy": "calibrated",
        "model": model,
        "rank": 4,
        "adapters": digests,
    }
    layers = range(1, 4)  # the first layer's X is the same for all
    expected = {
        f"q_{kind}.{layer}.{reader}": (4, WIDTH)
        for kind in "kv"
        for layer in layers
        for reader in AGENTS
    }
    expected |= {
        f"p.{layer}.{writer}.{reader}": (64, 4)
        for layer in layers
        for reader in AGENTS
        for writer in ("base", *AGENTS)
        if writer != reader
    }
    assert shapes == expected


@pytest.mark.parametrize(("rank", "ridge"), [(0, 0.1), (True, 0.1), (4, 0.0), (4, float("nan"))])
def test_settings_that_cannot_be_are_refused(rank: int, ridge: float) -> None:
    with pytest.raises(ConfigError):
        CalibrationConfig(rank, ridge)


def test_layers_before_the_first_are_left_alone(
    setup: Setup, texts: list[Recording], fitted: Mapping[int, Calibration]
) -> None:
    with setup.engine() as engine:
        late = calibrate(engine, texts, CalibrationConfig(4, ridge=1e-9, first_layer=LAYER))
        with pytest.raises(ConfigError, match="--first-layer: got 4, allowed is at most 3"):
            calibrate(engine, texts, CalibrationConfig(4, first_layer=4))
    assert {layer for layer, _ in late.corrections} == {2, 3}
    assert {layer for layer, _ in fitted[4].corrections} == {1, 2, 3}
    same, earlier = late.corrections[LAYER, READER], fitted[4].corrections[LAYER, READER]
    assert torch.equal(same.q_v, earlier.q_v)
    with pytest.raises(ConfigError, match="--first-layer: got 0"):
        CalibrationConfig(first_layer=0)


def test_a_rank_above_the_width_is_refused(setup: Setup, texts: list[Recording]) -> None:
    with setup.engine() as engine, pytest.raises(ConfigError, match="at most 64"):
        calibrate(engine, texts, CalibrationConfig(65))


def test_a_bigger_fit_cut_to_a_rank_is_the_fit_of_that_rank(
    setup: Setup, fitted: Mapping[int, Calibration], tmp_path: Path
) -> None:
    cut = runpy.run_path(str(ROOT / "benchmarks" / "cut_calibration.py"))["cut"]
    big, small = tmp_path / "big.safetensors", tmp_path / "small.safetensors"
    with setup.engine() as engine:
        fitted[2 * WIDTH].save(big, engine)
    cut(big, small, 4, range(LAYER, LAYER + 1))
    loaded = load_calibration(small)
    expected = fitted[4].corrections[LAYER, READER]
    assert loaded.rank == 4
    assert loaded.layers(READER) == {LAYER}
    for writer in WRITERS:
        for q, of_fit in ((loaded.q_k, expected.q_k), (loaded.q_v, expected.q_v)):
            got = loaded.p[LAYER, writer, READER] @ q[LAYER, READER]
            torch.testing.assert_close(got, expected.p[writer] @ of_fit, atol=1e-4, rtol=1e-3)
