"""The loaded matrices are exactly what PEFT would add to the weights, for every way of writing a config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from precache.adapters import TARGETS, LoraWeights, load_adapter
from tests.adapters.folders import (
    QKVO,
    QV,
    SHAPE,
    edit_config,
    edit_tensors,
    peft_deltas,
    tensor_name,
    write_adapter,
)


def _load(folder: Path) -> LoraWeights:
    return load_adapter(folder, SHAPE, dtype=torch.float32, device="cpu")


def assert_equals_peft(folder: Path) -> LoraWeights:
    weights, expected = _load(folder), peft_deltas(folder)
    assert set(weights.modules) == set(expected)
    for key, module in weights.modules.items():
        delta = module.lora_b @ module.lora_a
        largest = delta.abs().max().item()
        assert largest > 0.1
        # PEFT scales the product, we scale B: the same up to fp32 rounding of the largest entries.
        torch.testing.assert_close(delta, expected[key], rtol=0, atol=1e-6 * max(1.0, largest))
    return weights


CONFIGS: dict[str, dict[str, Any]] = {
    "qv": {"target_modules": QV},
    "qkvo": {"target_modules": QKVO},
    "all-linear": {"target_modules": "all-linear"},
    "all as a list": {"target_modules": list(TARGETS)},
    "regex": {"target_modules": r".*layers\.0.*\.(k|v)_proj"},
    "prefixed names": {"target_modules": ["model.layers.1.self_attn.q_proj", "self_attn.v_proj"]},
    "layers_to_transform": {"layers_to_transform": [1]},
    "one layer as a number": {"layers_to_transform": 2, "layers_pattern": "layers"},
    "full names ignore layers_to_transform": {
        "target_modules": ["model.layers.0.self_attn.q_proj", "v_proj"],
        "layers_to_transform": [2],
    },
    "exclude_modules": {
        "target_modules": "all-linear",
        "exclude_modules": ["k_proj", "mlp.up_proj"],
    },
    "exclude by regex": {"exclude_modules": r".*\.1\.self_attn\..*"},
    "rank_pattern": {"rank_pattern": {"v_proj": 2, r"layers\.0\.self_attn\.q_proj": 7}},
    "the first pattern wins": {"rank_pattern": {r".*\.1\..*": 3, "v_proj": 5}},
    "alpha_pattern": {"alpha_pattern": {"layers.2.self_attn.v_proj": 3, "q_proj": 5}},
    "both patterns, rslora": {
        "rank_pattern": {"v_proj": 2},
        "alpha_pattern": {"v_proj": 7},
        "use_rslora": True,
    },
    "rslora": {"use_rslora": True, "lora_alpha": 11},
    "alpha 1": {"lora_alpha": 1},
    "alpha = r": {"lora_alpha": 4},
    "rank 300": {"r": 300},
    "training leftovers": {"lora_dropout": 0.1, "init_lora_weights": "gaussian"},
    "orthogonal init": {"init_lora_weights": "orthogonal"},
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_module_equals_peft(tmp_path: Path, config: dict[str, Any]) -> None:
    assert_equals_peft(write_adapter(tmp_path / "a", **config))


def test_all_linear_may_stand_in_the_saved_config(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", target_modules="all-linear")
    weights = assert_equals_peft(edit_config(folder, target_modules="all-linear"))
    assert len(weights.modules) == 3 * 7


@pytest.mark.parametrize("empty", [None, []], ids=["null", "empty list"])
def test_a_config_without_targets_is_decided_by_the_tensors(tmp_path: Path, empty: object) -> None:
    weights = _load(edit_config(write_adapter(tmp_path / "a"), target_modules=empty))
    assert {target for _, target in weights.modules} == set(QV)


def test_names_with_the_default_adapter_name_load(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    plain = _load(folder)

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace(".weight", ".default.weight")] = tensors.pop(name)

    renamed = _load(edit_tensors(folder, rename))
    assert renamed.digest == plain.digest
    assert renamed.modules


def test_scaling_is_reported_and_folded_once(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", r=4, lora_alpha=12)
    raw: dict[str, torch.Tensor] = {}
    edit_tensors(folder, raw.update)
    module = _load(folder).modules[1, "v_proj"]
    assert module.scaling == 3.0
    torch.testing.assert_close(module.lora_b, 3.0 * raw[tensor_name(1, "v_proj", "B")])
    torch.testing.assert_close(module.lora_a, raw[tensor_name(1, "v_proj", "A")], rtol=0, atol=0)
    assert module.lora_a.shape == (4, 64)
    assert module.lora_b.shape == (32, 4)


@pytest.mark.parametrize("base", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("file", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_adapter_takes_the_dtype_of_the_model(
    tmp_path: Path, file: torch.dtype, base: torch.dtype
) -> None:
    folder = write_adapter(tmp_path / "a", dtype=file)
    weights = load_adapter(folder, SHAPE, dtype=base, device="cpu")
    reference = _load(folder)
    for key, module in weights.modules.items():
        assert module.lora_a.dtype == module.lora_b.dtype == base
        # Rounded once, after the scaling: nothing is lost beyond the model's own dtype.
        torch.testing.assert_close(
            module.lora_b, reference.modules[key].lora_b.to(base), rtol=0, atol=0
        )
    assert weights.digest == reference.digest  # over the file, not over what was made of it
