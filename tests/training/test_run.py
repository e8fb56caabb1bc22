"""A whole run on a tiny model: folders, held-out figures, resume, refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from precache.cli.train import format_report
from precache.tasks import Trajectory, split_of, write_trajectories
from precache.training import CheckpointMismatchError, Recipe, TrainConfig, TrainingDataError
from precache.training.checkpoint import CHECKPOINT_NAME, load_state
from precache.training.export import ADAPTER_WEIGHTS
from precache.training.run import load_corpus, train
from precache.training.trainer import RoleTrainer, StepResult
from tests.training.helpers import save_tiny, tiny_model, trajectories


class Killed(Exception):
    """Stands for a run that ends in the middle of a step."""


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    data = tmp_path / "runs.jsonl"
    write_trajectories(data, trajectories(40))
    return TrainConfig(
        data=data,
        out=tmp_path / "out",
        model=str(save_tiny(tmp_path / "model")),
        roles=("plan", "action"),
        recipe=Recipe(rank=4, steps=6, batch=2, lr=3e-2, warmup_steps=1),
        save_every=2,
        device="cpu",
    )


def _kill_at(monkeypatch: pytest.MonkeyPatch, role: str, step: int) -> None:
    original = RoleTrainer.step

    def dying_step(self: RoleTrainer) -> StepResult:
        if self.role == role and len(self.losses) == step:
            raise Killed
        return original(self)

    monkeypatch.setattr(RoleTrainer, "step", dying_step)


def test_output_is_a_stock_peft_folder_in_bf16(config: TrainConfig) -> None:
    train(config)

    for role in config.roles:
        folder = config.out / role
        weights = load_file(folder / ADAPTER_WEIGHTS)
        assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
        assert sorted(path.name for path in folder.iterdir()) == [
            "adapter_config.json",
            "adapter_model.safetensors",
            "training.json",
        ]
        saved = json.loads((folder / "adapter_config.json").read_text())
        assert (saved["r"], saved["lora_alpha"]) == (4, 16)
        assert saved["target_modules"] == ["q_proj", "v_proj"]
        assert saved["base_model_name_or_path"] == config.model


def test_peft_reads_the_folder_and_the_output_changes(config: TrainConfig) -> None:
    train(config)
    ids = torch.arange(10)[None]
    base = tiny_model()
    with torch.inference_mode():
        plain = base(ids).logits
        adapted = PeftModel.from_pretrained(base, str(config.out / "plan")).eval()(ids).logits

    assert float((adapted - plain).abs().max()) > 1e-3


def test_roles_differ_and_each_is_best_at_its_own_tokens(config: TrainConfig) -> None:
    report = train(replace(config, recipe=replace(config.recipe, steps=30, targets="all-linear")))

    for role in config.roles:
        other = next(r for r in config.roles if r != role)
        assert report.after[role][role].nll < report.before[role].nll
        assert report.after[role][role].nll < report.after[other][role].nll


def test_record_holds_recipe_and_figures(config: TrainConfig) -> None:
    report = train(config)
    record = json.loads((config.out / "action" / "training.json").read_text())

    assert record["recipe"] == config.recipe.as_dict()
    assert record["heldout_before"] == report.as_dict()["before"]
    assert record["heldout_after"] == report.as_dict()["after"]["action"]
    assert len(record["losses"]) == config.recipe.steps
    assert "base" in format_report(report, config)


@pytest.mark.parametrize(("role", "step"), [("plan", 3), ("action", 5), ("action", 0)])
def test_killed_run_resumes_to_the_same_files(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str, step: int
) -> None:
    whole = replace(config, out=tmp_path / "whole")
    train(whole)
    with monkeypatch.context() as patch:
        _kill_at(patch, role, step)
        with pytest.raises(Killed):
            train(config)
    assert any(config.out.glob(f"*/{CHECKPOINT_NAME}"))

    train(replace(config, resume=True))

    for name in config.roles:
        for file in (ADAPTER_WEIGHTS, "training.json", "adapter_config.json"):
            assert (config.out / name / file).read_bytes() == (whole.out / name / file).read_bytes()


def test_finished_roles_are_not_trained_again_on_resume(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        _kill_at(patch, "action", 3)
        with pytest.raises(Killed):
            train(config)
    _kill_at(monkeypatch, "plan", 0)  # would raise if plan began again

    assert set(train(replace(config, resume=True)).after) == {"plan", "action"}


def test_resume_with_another_recipe_is_refused(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        _kill_at(patch, "plan", 3)
        with pytest.raises(Killed):
            train(config)
    other = replace(config, resume=True, recipe=replace(config.recipe, lr=1e-2))

    with pytest.raises(CheckpointMismatchError, match=r"lr=0\.03, this run has lr=0\.01"):
        train(other)


def test_filled_output_is_refused_before_anything_is_written(config: TrainConfig) -> None:
    train(config)
    before = (config.out / "plan" / ADAPTER_WEIGHTS).read_bytes()

    with pytest.raises(CheckpointMismatchError, match="--resume"):
        train(config)
    with pytest.raises(CheckpointMismatchError, match="no checkpoint"):
        train(replace(config, resume=True))
    assert (config.out / "plan" / ADAPTER_WEIGHTS).read_bytes() == before


def test_broken_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / CHECKPOINT_NAME
    path.write_bytes(b"not a checkpoint")

    with pytest.raises(CheckpointMismatchError, match="is not a checkpoint"):
        load_state(path, {})


def test_heldout_questions_never_reach_the_training_side(config: TrainConfig) -> None:
    corpus = load_corpus(config)

    assert len(corpus.train) + len(corpus.heldout) == 40
    assert {split_of(t.question_id) for t in corpus.train} == {"train"}
    assert {split_of(t.question_id) for t in corpus.heldout} == {"heldout"}


def test_data_without_a_heldout_question_is_refused(config: TrainConfig) -> None:
    one = Trajectory("question number 0", trajectories(1)[0].segments)
    write_trajectories(config.data, [one])

    with pytest.raises(TrainingDataError, match=r"no trajectory on the \w+ side"):
        load_corpus(config)


def test_progress_bar_is_silent_in_a_pipe(
    config: TrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    train(replace(config, roles=("plan",)))

    captured = capsys.readouterr()
    assert "plan:" not in captured.err + captured.out


def test_command_prints_one_json_object_last_and_no_bar_in_a_pipe(config: TrainConfig) -> None:
    code = (
        "import argparse, sys\n"
        "from precache.cli.train import add_parser\n"
        "parser = argparse.ArgumentParser()\n"
        "add_parser(parser.add_subparsers())\n"
        "args = parser.parse_args(sys.argv[1:])\n"
        "sys.exit(args.func(args))\n"
    )
    options = ["--data", str(config.data), "--out", str(config.out), "--model", config.model]
    options += ["--role", "plan", "--steps", "1", "--device", "cpu", "--json"]
    result = subprocess.run(
        [sys.executable, "-c", code, "train", *options],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        check=True,
    )

    report = json.loads(result.stdout.splitlines()[-1])
    assert set(report) == {"before", "after", "seconds", "corpus", "skipped"}
    assert report["after"]["plan"]["plan"]["tokens"] > 0
    assert "it/s" not in result.stderr
