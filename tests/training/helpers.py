"""A tiny model and tokenizer on disk, and made-up trajectories; no network, well under a second."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from precache.tasks import Segment, Trajectory

TOOLS = ("Search", "Retrieve")


def trajectory(number: int) -> Trajectory:
    tool, topic = TOOLS[number % 2], f"topic {number}"
    return Trajectory(
        f"question number {number}",
        (
            Segment(None, f"Question: number {number}\nThought 1:"),
            Segment("plan", f" I read about {topic}.\n"),
            Segment(None, "Action 1:"),
            Segment("plan", f" {tool}["),
            Segment("action", f"{topic}]\n"),
            Segment(None, f"Observation 1: {topic} it is.\nThought 2:"),
            Segment("reflect", " Fine.\n"),
        ),
    )


def trajectories(count: int = 24) -> list[Trajectory]:
    return [trajectory(number) for number in range(count)]


def tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer in memory whose merges put the space before the word."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<end>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([t.text for t in trajectories()], trainer)
    return tokenizer


def tiny_model(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,  # large enough for LoRA to move the frozen output projection
    )
    return LlamaForCausalLM(config).eval()


def save_tiny(folder: Path) -> Path:
    """Save the tiny model and tokenizer as a transformers folder."""
    tiny_model().save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer(), eos_token="<end>").save_pretrained(
        folder
    )
    return folder
