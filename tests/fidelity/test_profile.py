"""The layers of the selective-recompute policies are those whose measured KL is lowest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from precache.errors import ConfigError
from precache.fidelity.profile import as_file, profile_layers
from precache.fidelity.recordings import Recording
from precache.fidelity.replay import compare
from tests.engine.setup import Setup

SHARE = 0.5  # two of four layers


def kl_of(
    setup: Setup, recordings: list[Recording], policy: str, layers: list[int], folder: Path
) -> float:
    """KL per token when just these layers are recomputed, through the file and the comparison."""
    path = folder / f"{layers}.json"
    path.write_text(
        json.dumps(
            {
                "format": "precache-recompute-1",
                "num_layers": 4,
                "policies": {policy: {"layers": layers}},
            }
        )
    )
    with setup.engine(recompute_share=SHARE, recompute_profile=path) as engine:
        found = compare(engine, recordings, [policy])
    scores = [score for by_role in found.runs[policy].scores for score in by_role.values()]
    return sum(score.kl for score in scores) / sum(score.tokens for score in scores)


def test_the_best_window_of_layers(
    setup: Setup, recordings: list[Recording], tmp_path: Path
) -> None:
    with setup.engine(recompute_share=SHARE) as engine:
        found = profile_layers(engine, "droidspeak", recordings)
    assert set(found.kl) == {(0, 1), (1, 2), (2, 3)}
    assert found.kl[found.layers] == min(found.kl.values())
    for layers, kl in found.kl.items():
        expected = kl_of(setup, recordings, "droidspeak", list(layers), tmp_path)
        assert kl == pytest.approx(expected, rel=1e-6)
    assert max(found.kl.values()) > 1.05 * min(found.kl.values())


def test_the_layers_that_matter_most_alone(
    setup: Setup, recordings: list[Recording], tmp_path: Path
) -> None:
    with setup.engine(recompute_share=SHARE) as engine:
        found = profile_layers(engine, "droidspeak-scattered", recordings)
    assert set(found.kl) == {(0,), (1,), (2,), (3,)}
    best = sorted(found.kl, key=found.kl.__getitem__)[:2]
    assert found.layers == tuple(sorted(layer for (layer,) in best))
    expected = kl_of(setup, recordings, "droidspeak-scattered", [2], tmp_path)
    assert found.kl[(2,)] == pytest.approx(expected, rel=1e-6)


def test_the_file_is_what_the_engine_reads(
    setup: Setup, recordings: list[Recording], tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    with setup.engine(recompute_share=SHARE) as engine:
        found = profile_layers(engine, "droidspeak", recordings[:1])
        as_file(engine, [found], 1).save(path)
        with engine.with_policy("droidspeak", recompute_profile=path) as profiled:
            group = profiled.policy.group(4)  # type: ignore[attr-defined]
    assert group.writes == frozenset(found.layers)
    made_by = json.loads(path.read_text())["made_by"]
    assert made_by["kl"]["droidspeak"] == [[list(k), v] for k, v in found.kl.items()]
    assert made_by["trajectories"] == 1


def test_a_stride_leaves_candidates_out(setup: Setup, recordings: list[Recording]) -> None:
    with setup.engine(recompute_share=0.25) as engine:
        found = profile_layers(engine, "droidspeak", recordings[:1], stride=3)
    assert set(found.kl) == {(0,), (3,)}


def test_what_cannot_be_profiled_is_refused(setup: Setup, recordings: list[Recording]) -> None:
    with setup.engine(recompute_share=0.1) as engine:
        with pytest.raises(ConfigError, match="--profile: got 'prelrshared'"):
            profile_layers(engine, "prelrshared", recordings)
        with pytest.raises(ConfigError, match="at least one layer"):
            profile_layers(engine, "droidspeak", recordings)
