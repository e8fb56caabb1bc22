"""Writes a trained role as a stock PEFT folder: config, bf16 safetensors, and `training.json`."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from safetensors.torch import save_file

ADAPTER_WEIGHTS = "adapter_model.safetensors"
TRAINING_RECORD = "training.json"


def export_adapter(
    model: PeftModel, folder: Path, base_name: str, record: dict[str, Any] | None
) -> None:
    """Write the active adapter into `folder`, which is made if needed.

    `base_name` is what users load as the base model. `record` is None while training still runs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.copy(model.peft_config["default"])
    assert isinstance(config, LoraConfig)
    config.base_model_name_or_path, config.inference_mode = base_name, True
    if isinstance(config.target_modules, set):
        config.target_modules = sorted(config.target_modules)  # the same file in every process
    config.save_pretrained(str(folder))
    tensors = get_peft_model_state_dict(model)
    weights = {name: t.detach().to(torch.bfloat16).contiguous() for name, t in tensors.items()}
    save_file(weights, str(folder / ADAPTER_WEIGHTS), metadata={"format": "pt"})
    if record is not None:
        text = json.dumps(record, indent=2, sort_keys=True) + "\n"
        (folder / TRAINING_RECORD).write_text(text, encoding="utf-8")
