"""Adapters for a benchmark that brings none: random LoRA of a common size, as PEFT folders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from precache.adapters.spec import ModelShape

LORA_RANK = 8
LORA_ALPHA = 16
TARGETS = ("q_proj", "v_proj")
B_STD = 0.02


def agent_names(count: int) -> list[str]:
    """Names in the order of the trace: plan first, reflect last, the others act."""
    if count == 1:
        return ["plan"]
    actors = ["action", *(f"action{number}" for number in range(2, count - 1))][: count - 2]
    return ["plan", *actors, "reflect"]


def write_random_adapters(
    shape: ModelShape, names: Sequence[str], folder: Path, seed: int
) -> dict[str, Path]:
    """Write one query and value LoRA per name (rank 8, non-zero A and B) and return the folders."""
    generator = torch.Generator().manual_seed(seed)
    return {name: _write(shape, folder / name, generator) for name in names}


def _write(shape: ModelShape, folder: Path, generator: torch.Generator) -> Path:
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(shape.num_layers):
        for target in TARGETS:
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            width, out = shape.in_features[target], shape.out_features[target]
            a = torch.randn(LORA_RANK, width, generator=generator) / width**0.5
            b = torch.randn(out, LORA_RANK, generator=generator) * B_STD
            tensors |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(_CONFIG), encoding="utf-8")
    return folder


_CONFIG = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": None,
    "r": LORA_RANK,
    "lora_alpha": LORA_ALPHA,
    "lora_dropout": 0.0,
    "target_modules": list(TARGETS),
    "bias": "none",
    "inference_mode": True,
}
