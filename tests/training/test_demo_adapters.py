"""The three adapters that ship with the project are what docs/training.md says they are."""

from __future__ import annotations

import json
from importlib.resources import files
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from precache.tasks import ROLES
from precache.training import Recipe

ADAPTERS = Path(str(files("precache"))) / "demo" / "adapters"


def _json(role: str, name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((ADAPTERS / role / name).read_text(encoding="utf-8"))
    return loaded


@pytest.mark.parametrize("role", ROLES)
def test_adapter_is_small_bf16_qv_rank_8(role: str) -> None:
    config = _json(role, "adapter_config.json")
    path = ADAPTERS / role / "adapter_model.safetensors"
    weights = load_file(path)

    assert (config["r"], config["lora_alpha"]) == (8, 16)
    assert sorted(config["target_modules"]) == ["q_proj", "v_proj"]
    assert config["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert path.stat().st_size < 1_100_000
    assert len(weights) == 30 * 2 * 2  # layers, q and v, A and B
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert all(bool(torch.isfinite(t).all() and t.abs().max() > 0) for t in weights.values())


@pytest.mark.parametrize("role", ROLES)
def test_adapter_was_trained_by_the_default_recipe_and_improved(role: str) -> None:
    record = _json(role, "training.json")

    assert record["recipe"] == Recipe().as_dict()
    assert len(record["losses"]) == Recipe().steps
    assert record["heldout_after"][role]["nll"] < 0.8 * record["heldout_before"][role]["nll"]


@pytest.mark.parametrize("role", ROLES)
def test_role_writes_its_own_tokens_best(role: str) -> None:
    nll = {name: _json(name, "training.json")["heldout_after"][role]["nll"] for name in ROLES}

    assert min(nll, key=lambda name: nll[name]) == role


@pytest.mark.parametrize(("first", "second"), list(combinations(ROLES, 2)))
def test_roles_have_different_weights_in_every_layer(first: str, second: str) -> None:
    one = load_file(ADAPTERS / first / "adapter_model.safetensors")
    two = load_file(ADAPTERS / second / "adapter_model.safetensors")

    assert one.keys() == two.keys()
    assert not any(torch.equal(one[name], two[name]) for name in one)
