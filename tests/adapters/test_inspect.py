"""Policy verdicts, the summary without a model, and the command `precache inspect`."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from precache.adapters.report import inspect_adapter
from precache.adapters.verdicts import (
    ALWAYS_ALLOWED,
    CALIBRATED,
    COMMON_A,
    allowed_policies,
    first_a_difference,
    model_conditions,
)
from precache.cli import inspect as command
from precache.errors import AdapterShapeError, UnsupportedAdapterError
from tests.adapters.folders import (
    QKVO,
    SHAPE,
    edit_config,
    edit_tensors,
    tensor_name,
    tiny_model,
    write_adapter,
)

ALL = [*ALWAYS_ALLOWED, CALIBRATED, COMMON_A]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "plan")


def _same_a(folder: Path, name: str, *, differ: tuple[int, str] | None = None) -> Path:
    """A copy with other B, and where `differ` says with another A."""
    copy = Path(shutil.copytree(folder, folder.parent / name))

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for key, tensor in tensors.items():
            if "lora_B" in key:
                tensor.mul_(-1)
        if differ is not None:
            tensors[tensor_name(*differ, "A")][0, 0] += 1

    return edit_tensors(copy, edit)


def _adapters(*folders: Path) -> list[Any]:
    return [inspect_adapter(folder, name=folder.name)[1] for folder in folders]


def test_equal_a_allows_the_common_strip(folder: Path) -> None:
    adapters = _adapters(folder, _same_a(folder, "action"), _same_a(folder, "reflect"))
    assert first_a_difference(adapters) is None
    assert [v.policy for v in allowed_policies(adapters) if v.allowed] == ALL
    assert len({adapter.digest for adapter in adapters}) == 2


def test_the_first_layer_that_differs_is_named(folder: Path) -> None:
    adapters = _adapters(
        folder,
        _same_a(folder, "action", differ=(2, "v_proj")),
        _same_a(folder, "reflect", differ=(1, "v_proj")),
    )
    assert first_a_difference(adapters) == (1, "v_proj", "plan", "reflect")
    refused = [verdict for verdict in allowed_policies(adapters) if not verdict.allowed]
    assert [verdict.policy for verdict in refused] == ["baselrshared"]
    assert "v_proj of layer 1 differs between 'plan' and 'reflect'" in refused[0].reason


def test_other_q_is_no_difference_and_a_missing_v_is_one(folder: Path, tmp_path: Path) -> None:
    other_q = _same_a(folder, "action", differ=(0, "q_proj"))
    assert first_a_difference(_adapters(folder, other_q)) is None
    q_only = write_adapter(tmp_path / "q", target_modules=["q_proj"])
    assert first_a_difference(_adapters(folder, q_only)) == (0, "v_proj", "plan", "q")
    assert first_a_difference([]) is None


def test_keys_count_after_values(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "plan", target_modules=QKVO)
    keys = _same_a(folder, "action", differ=(1, "k_proj"))
    assert first_a_difference(_adapters(folder, keys)) == (1, "k_proj", "plan", "action")
    assert (
        "plan, action: needs a model without key norms"
        in model_conditions(_adapters(folder, keys))[0]
    )


def test_one_adapter_may_run_everything(folder: Path) -> None:
    verdicts = allowed_policies(_adapters(folder))
    assert [verdict.policy for verdict in verdicts if verdict.allowed] == ALL
    assert "for this adapter alone" in verdicts[-1].reason


def test_key_norms_refuse_key_lora_only(folder: Path, tmp_path: Path) -> None:
    assert all(verdict.allowed for verdict in allowed_policies(_adapters(folder), key_norms=True))
    keys = _adapters(write_adapter(tmp_path / "keys", target_modules=QKVO))
    verdicts = allowed_policies(keys, key_norms=True)
    assert not any(verdict.allowed for verdict in verdicts)
    assert all("normalises its keys" in verdict.reason for verdict in verdicts)


def test_adapters_of_two_base_models_cannot_share(folder: Path, tmp_path: Path) -> None:
    other = write_adapter(tmp_path / "other", model=tiny_model(hidden_size=32))
    verdicts = allowed_policies(_adapters(folder, other))
    assert all("different base models" in verdict.reason for verdict in verdicts)


def test_summary_without_a_model(tmp_path: Path) -> None:
    folder = write_adapter(
        tmp_path / "a",
        target_modules="all-linear",
        rank_pattern={"layers.0.self_attn.v_proj": 2},
        dtype=torch.bfloat16,
    )
    edit_config(folder, base_model_name_or_path="org/x")
    summary, adapter = inspect_adapter(folder, name="a")
    groups = {(group.target, group.layers): group for group in summary.modules}
    assert groups["v_proj", (0,)].rank == 2
    assert groups["v_proj", (0,)].scaling == 4.0
    assert groups["v_proj", (1, 2)].scaling == 2.0
    assert [group.target for group in summary.modules][:4] == [
        "q_proj",
        "k_proj",
        "v_proj",
        "v_proj",
    ]
    assert summary.dtypes == ("bfloat16",)
    assert summary.base == "org/x"
    modules = adapter.weights.modules.values()
    assert summary.num_parameters == sum(m.lora_a.numel() + m.lora_b.numel() for m in modules)
    assert adapter.value_b(0) is not None
    assert inspect_adapter(folder, name="a", shape=SHAPE)[0].digest == summary.digest


def test_inconsistent_tensors_are_found_without_a_model(folder: Path) -> None:
    name = tensor_name(1, "q_proj", "A")
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.ones(4, 32)}))
    with pytest.raises(AdapterShapeError, match="layers.1.self_attn.q_proj"):
        inspect_adapter(folder, name="a")


def test_missing_targets_are_found_without_a_model(folder: Path) -> None:
    edit_config(folder, target_modules="all-linear")
    with pytest.raises(UnsupportedAdapterError, match="the config selects up_proj in layers 0-2"):
        inspect_adapter(folder, name="a")


def _run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["inspect", *arguments])
    status: int = args.func(args)
    return status


def test_command_prints_a_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = _same_a(folder, "action", differ=(1, "v_proj"))
    assert _run(str(folder), str(other)) == 0
    out = capsys.readouterr().out
    for text in ("plan  (", "v_proj      0-2              4      2", "together: plan, action"):
        assert text in out
    assert "refuses     baselrshared" in out
    assert "v_proj of layer 1 differs" in out


def test_command_prints_one_json_object(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(str(folder), "--json") == 0
    lines = capsys.readouterr().out.splitlines()
    report = json.loads(lines[-1])
    assert len(lines) == 1
    assert report["adapters"][0]["name"] == "plan"
    assert report["adapters"][0]["modules"][0]["layers"] == [0, 1, 2]
    assert [verdict["policy"] for verdict in report["policies"]] == ALL
    assert report["errors"] == []


def test_one_bad_folder_does_not_hide_the_others(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = edit_config(Path(shutil.copytree(folder, folder.parent / "bad")), use_dora=True)
    assert _run(str(bad), str(folder), "--json") == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: adapter ")
    assert "use_dora=True" in captured.err
    report = json.loads(captured.out.splitlines()[-1])
    assert [adapter["name"] for adapter in report["adapters"]] == ["plan"]
    assert report["errors"][0]["path"] == str(bad)


def test_model_is_read_from_its_config_alone(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model().config.save_pretrained(tmp_path / "model")  # no weights beside it
    assert _run(str(folder), "--model", str(tmp_path / "model")) == 0
    capsys.readouterr()
    tiny_model(hidden_size=32).config.save_pretrained(tmp_path / "model")
    assert _run(str(folder), "--model", str(tmp_path / "model")) == 2
    assert "this model needs [4, 32]" in capsys.readouterr().err
    assert _run(str(folder), "--model", str(tmp_path / "nowhere")) == 2
    assert "config of model" in capsys.readouterr().err


def test_equal_folder_names_stay_apart(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    twin = Path(shutil.copytree(folder, folder.parent / "other" / "plan"))
    assert _run(str(folder), str(twin), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert [adapter["name"] for adapter in report["adapters"]] == [str(folder), str(twin)]
