"""A small Llama with random weights, for traces that are too long for a real model on the machine at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

RANDOM_LLAMA = "random-llama"

_CONFIG: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
}


def write_random_llama(folder: Path, seed: int) -> str:
    """Save what ``--model random-llama`` names (2 layers, 4 heads, 2 KV heads of 64) and return its folder."""
    torch.manual_seed(seed)
    model: Any = LlamaForCausalLM
    model(LlamaConfig(**_CONFIG)).save_pretrained(folder)
    return str(folder)
