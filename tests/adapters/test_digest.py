"""Digests are equal wherever and under whatever name the same weights are loaded, and differ for anything else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from precache.adapters import LoraWeights, load_adapter
from tests.adapters.folders import (
    QKVO,
    SHAPE,
    TensorEdit,
    edit_config,
    edit_tensors,
    tensor_name,
    write_adapter,
)

_PROGRAM = """
import sys
import torch
from precache.adapters import ModelShape, load_adapter
targets = ("q_proj", "k_proj", "v_proj", "o_proj")
shape = ModelShape(3, dict.fromkeys(targets, 64), dict(zip(targets, (64, 32, 32, 64))), 100, 2, 16)
weights = load_adapter(sys.argv[1], shape, dtype=torch.float32, device="cpu")
print(weights.digest, weights.a_digest)
"""


def load(folder: Path, dtype: torch.dtype = torch.float32) -> LoraWeights:
    return load_adapter(folder, SHAPE, dtype=dtype, device="cpu")


def test_equal_in_processes_with_other_hash_seeds(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", target_modules=QKVO)
    other_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    elsewhere = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(folder)],
        env=os.environ | {"PYTHONHASHSEED": other_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    here = load(folder)
    assert elsewhere.stdout.split() == [here.digest, here.a_digest]


def test_independent_of_name_path_and_unused_fields(tmp_path: Path) -> None:
    first = write_adapter(tmp_path / "plan")
    second = Path(shutil.copytree(first, tmp_path / "deeper" / "action", dirs_exist_ok=True))
    edit_config(second, base_model_name_or_path="/old/place/x", lora_dropout=0.3)
    assert load(second).digest == load(first).digest
    assert len(load(first).digest) == 64


def _negate(tensors: dict[str, torch.Tensor]) -> None:
    tensors[tensor_name(2, "v_proj", "B")][0, 0] *= -1


def _swap_layers(tensors: dict[str, torch.Tensor]) -> None:
    for side in "AB":
        one, two = tensor_name(0, "v_proj", side), tensor_name(1, "v_proj", side)
        tensors[one], tensors[two] = tensors[two], tensors[one]


def _as_bf16(tensors: dict[str, torch.Tensor]) -> None:
    tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()})


@pytest.mark.parametrize("edit", [_negate, _swap_layers, _as_bf16])
def test_any_change_of_the_tensors_changes_it(tmp_path: Path, edit: TensorEdit) -> None:
    folder = write_adapter(tmp_path / "a")
    before = load(folder).digest
    assert load(edit_tensors(folder, edit)).digest != before


@pytest.mark.parametrize("change", [{"lora_alpha": 9}, {"use_rslora": True}], ids=str)
def test_the_scaling_is_part_of_it_but_not_of_the_strip(
    tmp_path: Path, change: dict[str, object]
) -> None:
    folder = write_adapter(tmp_path / "a")
    before = load(folder)
    after = load(edit_config(folder, **change))
    assert after.digest != before.digest
    assert after.a_digest == before.a_digest


def test_zero_and_minus_zero_are_two_bit_patterns(tmp_path: Path) -> None:
    name = tensor_name(0, "v_proj", "A")
    found = []
    for sign, folder in ((1.0, tmp_path / "plus"), (-1.0, tmp_path / "minus")):

        def edit(tensors: dict[str, torch.Tensor], sign: float = sign) -> None:
            tensors[name][0, 0] = sign * 0.0

        found.append(load(edit_tensors(write_adapter(folder), edit)))
    assert found[0].digest != found[1].digest
    assert found[0].a_digest != found[1].a_digest


def test_strip_digest_sees_the_a_of_v_and_k_only(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", target_modules=QKVO)
    before = load(folder).a_digest
    for target in ("q_proj", "o_proj"):
        edit_tensors(folder, lambda ts, t=target: ts[tensor_name(0, t, "A")].mul_(2))
    for target in QKVO:
        edit_tensors(folder, lambda ts, t=target: ts[tensor_name(1, t, "B")].mul_(2))
    assert load(folder).a_digest == before
    for target in ("k_proj", "v_proj"):
        edit_tensors(folder, lambda ts, t=target: ts[tensor_name(2, t, "A")].mul_(2))
        after = load(folder).a_digest
        assert after != before
        before = after


def test_strip_digest_is_of_the_values_that_are_used(tmp_path: Path) -> None:
    fp32 = write_adapter(tmp_path / "fp32")
    bf16 = edit_tensors(Path(shutil.copytree(fp32, tmp_path / "bf16")), _as_bf16)
    assert load(fp32).a_digest != load(bf16).a_digest
    # On a bf16 model both give the same X A, so they may share a strip.
    assert load(fp32, torch.bfloat16).a_digest == load(bf16, torch.bfloat16).a_digest
    assert load(fp32).a_digest != load(fp32, torch.bfloat16).a_digest
