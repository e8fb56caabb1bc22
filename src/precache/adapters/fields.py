"""What every field of a LoRA `adapter_config.json` means here: used, without effect on the result, or refused.

Owns the decision field by field (PEFT 0.21's LoraConfig and what older versions wrote). Does not read files and does
not look at tensors. A field that is not listed belongs to a version of PEFT that nobody has looked at: it is refused
by name unless its value is empty, because ignoring it could give an adapter that is neither base nor fine-tune.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Parsed by spec.py.
_USED = frozenset(
    {
        "peft_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "base_model_name_or_path",
        "init_lora_weights",
    }
)

# Book-keeping, training only, or settings of an initialisation that is already in the weights.
_NO_EFFECT = frozenset(
    {
        "task_type",
        "auto_mapping",
        "peft_version",
        "revision",
        "inference_mode",
        "lora_dropout",
        "megatron_core",  # names a package; only megatron_config switches anything on
        "qalora_group_size",  # only read with use_qalora
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "runtime_config",
        "ensure_weight_tying",  # only reaches embeddings, which are refused with or without it
    }
)

# Field -> why anything but an empty value is refused.
_REFUSED = {
    "use_dora": "weight-decomposed LoRA is not implemented",
    "lora_bias": "a bias on lora_B is not implemented",
    "modules_to_save": "fully trained modules are not implemented",
    "alora_invocation_tokens": "activated LoRA is not implemented",
    "alora_invocation_string": "activated LoRA is not implemented",
    "trainable_token_indices": "trained token embeddings are not implemented",
    "target_parameters": "LoRA on bare parameters is not implemented",
    "layer_replication": "replicated layers are not implemented",
    "megatron_config": "Megatron layers are not implemented",
    "use_qalora": "QALoRA pools the input and is not implemented",
    "arrow_config": "Arrow routing is not implemented",
    "use_bdlora": "block-diagonal LoRA is not implemented",
    "velora_config": "VeLoRA is not implemented",
    "monteclora_config": "Monte Carlo LoRA is not implemented",
    "kasa_config": "KaSA changes the base weights and is not implemented",
    "fan_in_fan_out": "transposed (Conv1D) layers are not implemented",
}

# PEFT subtracts the initial B@A from the base weights (or quantises them), so the adapter does not fit the stock base.
_REWRITES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def unsupported_fields(config: Mapping[str, Any]) -> list[str]:
    """Name every field whose value asks for something that is not implemented."""
    problems = [_field_problem(name, value) for name, value in sorted(config.items())]
    return [problem for problem in problems if problem is not None]


def _field_problem(name: str, value: object) -> str | None:
    if name == "bias":
        allowed = value in (None, "none")
        return None if allowed else f"bias={value!r}: trained biases are not implemented"
    if name == "init_lora_weights":
        return _init_problem(value)
    if name in _USED or name in _NO_EFFECT or not value:
        return None
    reason = _REFUSED.get(
        name, "unknown field of adapter_config.json, only an empty value is allowed"
    )
    return f"{name}={_short(value)}: {reason}"


def _init_problem(value: object) -> str | None:
    if not str(value).lower().startswith(_REWRITES_BASE):
        return None
    return (
        f"init_lora_weights={value!r}: this initialisation changes the base weights; convert the adapter with PEFT's "
        "save_pretrained(path_initial_model_for_weight_conversion=...), or train from a stock initialisation"
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
