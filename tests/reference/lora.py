"""Real PEFT adapter folders with large random weights, and an independent reader of such folders.

Owns: `make_adapter` (writes through peft's own `save_pretrained`) and `read_adapter` (safetensors
and json only).
"""

import json
import math
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import peft
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

QV = ("q_proj", "v_proj")
QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_LINEAR = (*QKVO, "gate_proj", "up_proj", "down_proj")

_WEIGHT_NAME = re.compile(
    r"layers\.(?P<layer>\d+)\.(?:self_attn|mlp)\.(?P<target>\w+)\.lora_(?P<factor>[AB])\.weight$"
)


class Lora(NamedTuple):
    """One low-rank update: `W x + scaling * B (A x)`."""

    a: Tensor  # [lora_rank, in]
    b: Tensor  # [out, lora_rank]
    scaling: float


AdapterDict = dict[tuple[int, str], Lora]  # (layer, target such as "v_proj") -> Lora


def make_adapter(
    model_folder: str | Path,
    out_folder: str | Path,
    *,
    targets: Collection[str] = QV,
    rank: int = 4,
    alpha: int = 8,
    seed: int = 0,
    std: float = 0.15,
    share_a_with: str | Path | None = None,
    share_a_targets: Collection[str] = ("k_proj", "v_proj"),
    rank_pattern: dict[str, int] | None = None,
    alpha_pattern: dict[str, int] | None = None,
    layers_to_transform: list[int] | None = None,
    rslora: bool = False,
    **lora_config: Any,
) -> Path:
    """Write a PEFT adapter with random, non-zero A and B for the model of `model_folder`.

    `std` is B's deviation (0 gives the zero adapter); A keeps `x A` near unit size.
    `share_a_with` names an adapter folder whose A of `share_a_targets` is copied bit for bit where
    both adapters have that module, which is what `baselrshared` asks for. Any further keyword goes
    to `peft.LoraConfig` (`use_dora=True`, `bias="all"`, ...), for tests of what must be refused.
    """
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=alpha,
        target_modules=list(targets),
        rank_pattern=rank_pattern or {},
        alpha_pattern=alpha_pattern or {},
        layers_to_transform=layers_to_transform,
        use_rslora=rslora,
        **lora_config,
    )
    base = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    model = peft.get_peft_model(base, config)
    _randomise(model, seed, std)
    if share_a_with is not None:
        _copy_a(model, share_a_with, share_a_targets)
    model.save_pretrained(str(out_folder))
    return Path(out_folder)


def _randomise(model: peft.PeftModel, seed: int, std: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        if "lora_A" in name:
            scale = parameter.shape[1] ** -0.5
        elif "lora_B" in name:
            scale = std
        else:
            continue
        with torch.no_grad():
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))


def _copy_a(model: peft.PeftModel, source: str | Path, targets: Collection[str]) -> None:
    shared = read_adapter(source)
    for name, parameter in model.named_parameters():
        match = _WEIGHT_NAME.search(name.replace(".default.", "."))
        if match is None or match["factor"] != "A" or match["target"] not in targets:
            continue
        lora = shared.get((int(match["layer"]), match["target"]))
        if lora is not None:
            with torch.no_grad():
                parameter.copy_(lora.a)


def read_adapter(folder: str | Path) -> AdapterDict:
    """Read a PEFT LoRA folder without peft."""
    config = json.loads((Path(folder) / "adapter_config.json").read_text())
    weights = load_file(Path(folder) / "adapter_model.safetensors")
    adapter: AdapterDict = {}
    for name, a in weights.items():
        match = _WEIGHT_NAME.search(name)
        if match is None or match["factor"] != "A":
            continue
        b = weights[name.replace("lora_A", "lora_B")]
        scaling = _scaling(config, name.removesuffix(".lora_A.weight"), rank=a.shape[0])
        adapter[int(match["layer"]), match["target"]] = Lora(a.float(), b.float(), scaling)
    return adapter


def _scaling(config: dict[str, Any], module_name: str, rank: int) -> float:
    alpha = config["lora_alpha"]
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module_name):
            alpha = value
            break
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
