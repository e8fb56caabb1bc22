"""Adapters for a benchmark that brings none: random LoRA of a common size, as PEFT folders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from precache.adapters.spec import ModelShape

LORA_RANK = 8
TARGETS = {
    "qv": ("q_proj", "v_proj"),
    "qkvo": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "all": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
}
B_STD = 0.02


def agent_names(count: int) -> list[str]:
    """Names in the order of the trace: plan first, reflect last, the others act."""
    if count == 1:
        return ["plan"]
    actors = ["action", *(f"action{number}" for number in range(2, count - 1))][: count - 2]
    return ["plan", *actors, "reflect"]


def write_random_adapters(
    shape: ModelShape,
    names: Sequence[str],
    folder: Path,
    seed: int,
    *,
    rank: int = LORA_RANK,
    targets: str = "qv",
) -> dict[str, Path]:
    """Write one LoRA per name with non-zero A and B and return the folders. ``targets`` is a key of TARGETS."""
    generator = torch.Generator().manual_seed(seed)
    return {name: _write(shape, folder / name, generator, rank, TARGETS[targets]) for name in names}


def _write(
    shape: ModelShape,
    folder: Path,
    generator: torch.Generator,
    rank: int,
    targets: Sequence[str],
) -> Path:
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(shape.num_layers):
        for target in targets:
            parent = "mlp" if target in ("gate_proj", "up_proj", "down_proj") else "self_attn"
            prefix = f"base_model.model.model.layers.{layer}.{parent}.{target}"
            width, out = shape.in_features[target], shape.out_features[target]
            a = torch.randn(rank, width, generator=generator) / width**0.5
            b = torch.randn(out, rank, generator=generator) * B_STD
            tensors |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "target_modules": list(targets),
        "bias": "none",
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
