"""Real PEFT folders on a tiny random Llama, and the edits that spoil them. PEFT is the oracle of these tests."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from precache.adapters import TARGETS, ModelShape

NUM_LAYERS, HIDDEN, INNER, VOCAB = 3, 64, 96, 100
QV = ["q_proj", "v_proj"]
QKVO = ["q_proj", "k_proj", "v_proj", "o_proj"]
SHAPE = ModelShape(
    num_layers=NUM_LAYERS,
    in_features=dict.fromkeys(TARGETS[:6], HIDDEN) | {"down_proj": INNER},
    out_features=dict.fromkeys(TARGETS, HIDDEN)
    | {"k_proj": 32, "v_proj": 32, "gate_proj": INNER, "up_proj": INNER},
    vocab_size=VOCAB,
    num_kv_heads=2,
    head_dim=16,
    base_names=("org/tiny-llama",),
)

FILES = ("adapter_config.json", "adapter_model.safetensors")

# PEFT needs half a second per folder, most of it for a model card; the many tests that start from the same config
# share its bytes.
_written: dict[str, dict[str, bytes]] = {}

TensorEdit = Callable[[dict[str, Tensor]], object]


def tiny_model(**overrides: Any) -> LlamaForCausalLM:
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**(settings | overrides)))


def write_adapter(
    folder: Path,
    *,
    seed: int = 1,
    dtype: torch.dtype = torch.float32,
    model: torch.nn.Module | None = None,
    **config: Any,
) -> Path:
    """Write an adapter with PEFT; every trained number is non-zero (an untouched B would equal the base)."""
    key = repr((seed, dtype, sorted(config.items())))
    if model is None and key in _written:
        folder.mkdir(parents=True)
        for file, data in _written[key].items():
            (folder / file).write_bytes(data)
        return folder
    _save_with_peft(folder, seed, dtype, model or tiny_model(), config)
    if model is None:
        _written[key] = {file: (folder / file).read_bytes() for file in FILES}
    return folder


def _save_with_peft(
    folder: Path, seed: int, dtype: torch.dtype, model: torch.nn.Module, config: dict[str, Any]
) -> None:
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": QV}
    lora = peft.LoraConfig(task_type="CAUSAL_LM", **(settings | config))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's advice on odd configs is not the subject
        adapted = peft.get_peft_model(model, lora)
        generator = torch.Generator().manual_seed(seed)
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
        adapted.to(dtype).save_pretrained(folder)


def peft_deltas(folder: Path) -> dict[tuple[int, str], Tensor]:
    """What PEFT adds to each weight. It loads into a default init, so a tensor it did not find gives a zero delta."""
    model = peft.PeftModel.from_pretrained(tiny_model(), str(folder))
    return {
        (int(name.split(".layers.")[1].split(".")[0]), name.rsplit(".", 1)[1]): (
            module.get_delta_weight("default").detach()
        )
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }


def edit_config(folder: Path, **changes: Any) -> Path:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def edit_tensors(folder: Path, edit: TensorEdit) -> Path:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)
    return folder


def tensor_name(layer: int, target: str, side: str) -> str:
    parent = "mlp" if target in TARGETS[4:] else "self_attn"
    return f"base_model.model.model.layers.{layer}.{parent}.{target}.lora_{side}.weight"
