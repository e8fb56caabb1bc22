"""Every wrong option is refused before any work, naming what, got and allowed."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from precache.cli.train import add_parser, config_from_args
from precache.errors import ConfigError
from precache.training import Recipe, TrainConfig


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("rank", 0, "integer of at least 1"),
        ("alpha", -1, "integer of at least 1"),
        ("steps", 0, "integer of at least 1"),
        ("steps", 2.5, "integer of at least 1"),
        ("batch", True, "integer of at least 1"),
        ("warmup_steps", -1, "integer of at least 0"),
        ("max_tokens", 15, "integer of at least 16"),
        ("seed", -1, "integer of at least 0"),
        ("lr", 0.0, "more than 0 and at most 1"),
        ("lr", float("nan"), "more than 0 and at most 1"),
        ("targets", "kv", "qv, qkvo, all-linear"),
        ("dtype", "float16", "float32, bfloat16"),
    ],
)
def test_wrong_recipe_is_refused(field: str, value: Any, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Recipe(**{field: value})

    assert (caught.value.field, caught.value.got is value) == (field, True)
    assert allowed in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("task", "squad", "scienceqa, hotpotqa"),
        ("roles", (), "at least one role"),
        ("roles", ("plan", "plan"), "each role at most once"),
        ("roles", ("critic",), "plan, action, reflect"),
        ("data", Path("/nowhere"), "exists"),
        ("device", "tpu", "auto, cpu, cuda"),
        ("heldout_episodes", 0, "integer of at least 1"),
        ("save_every", 0, "integer of at least 1"),
    ],
)
def test_wrong_run_is_refused(tmp_path: Path, field: str, value: Any, allowed: str) -> None:
    options: dict[str, Any] = {"data": tmp_path, "out": tmp_path / "out", field: value}

    with pytest.raises(ConfigError, match=allowed):
        TrainConfig(**options)


def test_output_that_is_a_file_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.touch()

    with pytest.raises(ConfigError, match="out: got"):
        TrainConfig(data=tmp_path, out=out)


def test_own_data_file_may_bring_its_own_roles(tmp_path: Path) -> None:
    data = tmp_path / "runs.jsonl"
    data.touch()

    assert TrainConfig(data=data, out=tmp_path / "out", roles=("critic",)).roles == ("critic",)


def _parse(*options: str) -> TrainConfig:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return config_from_args(parser.parse_args(["train", *options]))


def test_cli_defaults_are_the_dataclasses_own(tmp_path: Path) -> None:
    config = _parse("--data", str(tmp_path), "--out", str(tmp_path / "out"))

    assert config == TrainConfig(data=tmp_path, out=tmp_path / "out")


def test_every_cli_option_arrives(tmp_path: Path) -> None:
    config = _parse(
        *["--data", str(tmp_path), "--out", str(tmp_path / "o"), "--task", "hotpotqa"],
        *["--role", "plan", "--role", "reflect", "--model", "m", "--device", "cpu", "--resume"],
        *["--heldout-episodes", "3", "--save-every", "4", "--rank", "5", "--alpha", "6"],
        *["--steps", "7", "--batch", "8", "--lr", "0.5", "--warmup-steps", "9"],
        *["--max-tokens", "20", "--seed", "11", "--targets", "qkvo", "--dtype", "bfloat16"],
    )

    assert config == TrainConfig(
        data=tmp_path,
        out=tmp_path / "o",
        task="hotpotqa",
        roles=("plan", "reflect"),
        model="m",
        device="cpu",
        resume=True,
        heldout_episodes=3,
        save_every=4,
        recipe=Recipe(5, 6, "qkvo", 7, 8, 0.5, 9, 20, 11, "bfloat16"),
    )
