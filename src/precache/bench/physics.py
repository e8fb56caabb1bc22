"""Operations and bytes of a turn by formula: what a policy must compute, and what a decode step must read.

Leading terms only: products of matrices, attention, LoRA and strips. Elementwise work, embeddings and Python are left
out, so a measured time over the predicted one says how far an implementation is from its hardware. docs/performance.md
has the same formulas in words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from transformers import PreTrainedConfig

from precache.bench.trace import Trace
from precache.engine.model import model_shape_from_config


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a decoder. ``queries`` and ``keys`` are heads x head_dim and KV heads x head_dim."""

    layers: int
    hidden: int
    queries: int
    keys: int
    heads: int
    inner: int
    vocab: int

    @classmethod
    def of(cls, config: PreTrainedConfig) -> Self:
        """From a transformers config. Raises UnsupportedModelError."""
        shape = model_shape_from_config(config)
        return cls(
            layers=shape.num_layers,
            hidden=shape.in_features["q_proj"],
            queries=shape.out_features["q_proj"],
            keys=shape.out_features["k_proj"],
            heads=config.num_attention_heads,
            inner=shape.out_features["up_proj"],
            vocab=shape.vocab_size,
        )

    @property
    def row(self) -> int:
        """Weights that a token passes in one decoder layer."""
        return self.hidden * (2 * self.queries + 2 * self.keys + 3 * self.inner)

    @property
    def weights(self) -> int:
        """Weights that a decode step reads: all layers and the head."""
        return self.layers * self.row + self.vocab * self.hidden

    @property
    def base_numbers(self) -> int:
        """Cached numbers of one token: k and v of all layers."""
        return 2 * self.layers * self.keys


@dataclass(frozen=True)
class LoraSize:
    """QV LoRA of one rank, and how many agents have one."""

    agents: int
    rank: int = 8

    def own(self, size: ModelSize) -> int:
        """Weights of one adapter that a token passes in one layer."""
        return self.rank * (2 * size.hidden + size.queries + size.keys)


@dataclass(frozen=True)
class Method:
    """What the formulas need to know of a policy.

    ``caches`` says whether every agent has a base cache of its own, ``strips`` whether there is one strip an agent,
    ``neutral`` whether a turn's tokens run once more with adapters off, ``catch_up`` whether a reader's own pass goes
    over what others wrote.
    """

    caches: bool = False
    strips: bool = False
    neutral: bool = False
    catch_up: bool = False


METHODS = {
    "nonshared": Method(caches=True),
    "fullshared": Method(),
    "baseshared": Method(strips=True, catch_up=True),
    "prelrshared": Method(strips=True),
    "rebaseshared": Method(strips=True, neutral=True),
}


def prefill_flops(size: ModelSize, rows: int, context: int) -> float:
    """Operations of ``rows`` tokens behind ``context`` cached ones, adapters off."""
    seen = rows * context + rows * (rows + 1) / 2
    return size.layers * (2 * rows * size.row + 4 * size.queries * seen)


def adapted_flops(
    size: ModelSize, lora: LoraSize, method: Method, rows: int, context: int
) -> float:
    """Operations of a turn's own pass: the base model, the own LoRA, the strips that it writes and reads."""
    seen = rows * context + rows * (rows + 1) / 2
    written = lora.agents * lora.rank * size.hidden if method.strips else 0
    read = 2 * size.heads * lora.rank * seen if method.strips else 0
    return prefill_flops(size, rows, context) + size.layers * (
        2 * rows * (lora.own(size) + written) + read
    )


def decode_bytes(
    size: ModelSize, lora: LoraSize, method: Method, context: int, itemsize: int
) -> float:
    """Bytes that one decode step reads: weights, k and v, and the reader's own strip."""
    strip = size.layers * lora.rank if method.strips else 0
    return itemsize * (size.weights + context * (size.base_numbers + strip))


def bytes_per_token(size: ModelSize, lora: LoraSize, method: Method, itemsize: int) -> int:
    """Cached bytes of a token that all agents have read."""
    base = size.base_numbers * (lora.agents if method.caches else 1)
    strips = size.layers * lora.rank * lora.agents if method.strips else 0
    return itemsize * (base + strips)


@dataclass(frozen=True)
class Prediction:
    """Operations up to the first token, and of neutral passes after the last, summed over a trace's turns."""

    ttft_flops: float
    neutral_flops: float
    decode_bytes: float


def predict(
    size: ModelSize, lora: LoraSize, method: Method, trace: Trace, itemsize: int
) -> Prediction:
    """What a trace costs by formula, when every turn finds everything that it may reuse."""
    ttft = neutral = read = 0.0
    length = 0
    known = dict.fromkeys(trace.agents, 0)  # tokens that the agent's own cache, or strip, covers
    for step in trace.steps:
        prompt = length + step.prompt
        shared = known[step.agent] if method.caches else max(0, length - 1)
        if method.catch_up:
            missing = shared - known[step.agent]
            ttft += adapted_flops(size, lora, method, missing, known[step.agent])
        ttft += adapted_flops(size, lora, method, prompt - shared, shared)
        for context in range(prompt, prompt + step.output - 1):
            read += decode_bytes(size, lora, method, context, itemsize)
        length = prompt + step.output
        if method.neutral:
            neutral += prefill_flops(size, length - 1 - shared, shared)
        known[step.agent] = length - 1
    return Prediction(ttft, neutral, read)
