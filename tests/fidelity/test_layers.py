"""The per-layer picture, against hidden states, keys and values of the slow reference."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from precache.fidelity.capture import SPLIT, own_states, shared_states
from precache.fidelity.layers import LayerPicture, LayerRow, layer_picture
from precache.fidelity.recordings import Recording
from tests.engine.setup import Setup
from tests.engine.trajectories import answer
from tests.reference.forward import Network
from tests.reference.lora import AdapterDict, read_adapter


@pytest.fixture(scope="module")
def picture(setup: Setup, recordings: list[Recording]) -> LayerPicture:
    with setup.engine() as engine:
        return layer_picture(engine, recordings)


@dataclass
class Expected:
    """Of all run tokens: X (after the norm), k and v_base [tokens, width] of each layer."""

    x: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]


def run_alone(setup: Setup, recording: Recording, agent: str) -> Expected:
    """Everything by one agent, adapters off for ``base``: its own states, without its LoRA in k and v."""
    network = Network(setup.stock)
    adapter: AdapterDict = {} if agent == "base" else read_adapter(setup.adapters()[agent])
    ids = recording.token_ids[: recording.num_run]

    def context(layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        return network.keys(layer, x, 0, adapter), network.values(layer, x, adapter)

    inputs = network.run(ids, 0, adapter, context).inputs
    return Expected(
        inputs,
        [rows(network.keys(layer, x, 0, {})) for layer, x in enumerate(inputs)],
        [rows(network.values(layer, x, {})) for layer, x in enumerate(inputs)],
    )


def rows(heads: Tensor) -> Tensor:
    return heads.transpose(0, 1).flatten(1)


def written(
    setup: Setup, recording: Recording
) -> tuple[list[Tensor], list[Tensor], list[str | None]]:
    """k, v_base and writers that the agents leave behind under prelrshared."""
    state = setup.reference(SPLIT)
    ids = list(recording.token_ids)
    for turn in recording.turns:
        answer(state, turn.role, ids[: turn.start], ids[turn.start : turn.end])
    caches = state.caches()
    return [rows(k) for k in caches.k], [rows(v) for v in caches.v], state.writers


def test_own_states_are_the_reference_s(setup: Setup, recordings: list[Recording]) -> None:
    with setup.engine(SPLIT) as engine:
        for agent in ("plan", "base"):
            ours = own_states(engine, recordings[0], agent)
            theirs = run_alone(setup, recordings[0], agent)
            for layer in range(4):
                normed = norm(setup, layer, ours.hidden[layer])
                assert torch.allclose(normed, theirs.x[layer], atol=1e-4)
                assert torch.allclose(ours.k[layer], theirs.k[layer], atol=1e-4)
                assert torch.allclose(ours.v_base[layer], theirs.v[layer], atol=1e-4)
            assert set(ours.writers) == {agent}


def norm(setup: Setup, layer: int, hidden: Tensor) -> Tensor:
    return Network(setup.stock)._norm(hidden, f"model.layers.{layer}.input_layernorm")


def test_shared_states_are_the_reference_s(setup: Setup, recordings: list[Recording]) -> None:
    k, v, writers = written(setup, recordings[0])
    with setup.engine(SPLIT) as engine:
        ours = shared_states(engine, recordings[0])
        own = own_states(engine, recordings[0], "plan")
    assert list(ours.writers) == writers
    for layer in range(4):
        assert torch.allclose(ours.k[layer], k[layer], atol=1e-4)
        assert torch.allclose(ours.v_base[layer], v[layer], atol=1e-4)
    assert not torch.allclose(own.k[3], k[3], atol=1e-2)


def test_errors_are_those_of_the_reference(
    setup: Setup, recordings: list[Recording], picture: LayerPicture
) -> None:
    writer, reader, layer = "plan", "action", 2
    tops, bottoms, scale = 0.0, 0.0, 0.0
    for recording in recordings:
        k, _, writers = written(setup, recording)
        own, neutral = (run_alone(setup, recording, agent) for agent in (reader, "base"))
        at = [n for n, name in enumerate(writers) if name == writer]
        tops += float((k[layer][at] - own.k[layer][at]).square().sum())
        bottoms += float((neutral.k[layer][at] - own.k[layer][at]).square().sum())
        scale += float(own.k[layer][at].square().sum())
    row = row_of(picture, writer, reader, layer)
    assert row.k.writer == pytest.approx(math.sqrt(tops / scale), rel=1e-3)
    assert row.k.neutral == pytest.approx(math.sqrt(bottoms / scale), rel=1e-3)
    assert row.k.ratio == pytest.approx(math.sqrt(tops / bottoms), rel=1e-3)
    assert row.k.ratio != pytest.approx(row_of(picture, reader, writer, layer).k.ratio, rel=1e-2)


def row_of(picture: LayerPicture, writer: str, reader: str, layer: int) -> LayerRow:
    (row,) = [
        row
        for row in picture.rows()
        if (row.writer, row.reader, row.layer) == (writer, reader, layer)
    ]
    return row


def test_the_condition_names_the_closer_hidden_states(picture: LayerPicture) -> None:
    deep = [row for row in picture.rows() if row.layer > 0]
    assert len(deep) == 6 * 3  # ordered pairs of three roles, layers
    for row in deep:
        assert row.neutral_expected == (row.hidden.ratio >= 1)
        # |d_w - d_r|^2 = |d_w|^2 + |d_r|^2 - 2 |d_w| |d_r| cos, over |d_r|^2
        assert row.hidden.ratio**2 == pytest.approx(
            row.rho**2 + 1 - 2 * row.rho * row.cosine, rel=1e-3
        )
    assert {row.neutral_expected for row in deep} <= {True, False}


def test_all_passes_enter_the_first_layer_alike(picture: LayerPicture) -> None:
    first = [row for row in picture.rows() if row.layer == 0]
    assert {row.hidden.writer for row in first} == {0.0}
    assert {row.hidden.ratio for row in first} == {1.0}


def test_pairs_count_the_layers_that_are_predicted(picture: LayerPicture) -> None:
    for pair in picture.pairs():
        rows = [
            row
            for row in picture.rows()
            if (row.writer, row.reader) == (pair.writer, pair.reader) and row.layer > 0
        ]
        assert pair.layers == 3
        assert pair.expected == sum(row.neutral_expected for row in rows)
        assert pair.k_right == sum(row.neutral_expected == (row.k.ratio >= 1) for row in rows)
        assert pair.hidden_ratio.low is not None
        assert pair.hidden_ratio.low <= pair.hidden_ratio.value
        ratios = [row.k.ratio for row in rows]
        assert min(ratios) <= pair.k_ratio.value <= max(ratios)
    by_writer = {pair.writer: pair.tokens for pair in picture.pairs()}
    assert by_writer == {"plan": 3 * 25, "action": 3 * 15, "reflect": 3 * 10}
