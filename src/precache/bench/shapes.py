"""Models by their config alone: built-in ones by name, any other by its config.json. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from precache.errors import ModelError

_EIGHT_BILLION = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llama-3.1-8b": _EIGHT_BILLION
    | {
        "model_type": "llama",
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "ministral-8b": _EIGHT_BILLION
    | {
        "model_type": "mistral",
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "vocab_size": 131_072,
        "max_position_embeddings": 32_768,
    },
    "qwen3-8b": _EIGHT_BILLION
    | {
        "model_type": "qwen3",
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
    },
    "smollm2-135m": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1_536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49_152,
        "max_position_embeddings": 8_192,
        "tie_word_embeddings": True,
    },
}


def model_config(name: str) -> PreTrainedConfig:
    """A built-in config by name, or that of a local folder or config.json. Raises ModelError."""
    if name in CONFIGS:
        facts = dict(CONFIGS[name])
        config: PreTrainedConfig = AutoConfig.for_model(facts.pop("model_type"), **facts)
        return config
    if not Path(name).exists():
        raise ModelError(
            f"model {name!r}: no such file or folder, and not one of the built-in {sorted(CONFIGS)}"
        )
    try:
        found: PreTrainedConfig = AutoConfig.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"model {name!r}: its config cannot be read: {error}") from error
    return found
