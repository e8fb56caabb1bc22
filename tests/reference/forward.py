"""The transformer written out by hand: one pass over some tokens, full softmax matrices, no cache.

Owns: embeddings, norms, RoPE, projections with LoRA, masks, MLP and logits of the tiny models, from
the state dict and the config of a Hugging Face model and from nothing else of it.
Does not own: where keys and values come from. A pass asks a `Context` for them, layer by layer, and
the policies (`policies.py`) are nothing but different contexts.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu
from transformers import PreTrainedModel

from .lora import AdapterDict

# (layer, X of the tokens of the pass) -> keys and values of the tokens 0 .. end of the pass,
# each [num_kv_heads, context_len, head_dim], keys after RoPE
Context = Callable[[int, Tensor], tuple[Tensor, Tensor]]


class Pass(NamedTuple):
    """What one pass gave: everything a policy may store is a function of the layer inputs X."""

    inputs: list[Tensor]  # per layer, after the input norm: [num_tokens, hidden_size]
    logits: Tensor  # [num_tokens, vocab_size]
    hidden: list[Tensor]  # per layer, what enters it: [num_tokens, hidden_size]


class Network:
    """The formulas of one model, each as its own small method."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.config = model.config
        self.weights = dict(model.state_dict())
        self.num_layers: int = self.config.num_hidden_layers
        self.head_dim: int = self.config.head_dim
        self.is_gemma = self.config.model_type.startswith("gemma")

    @torch.no_grad()
    def run(
        self, token_ids: Sequence[int], start: int, adapter: AdapterDict, context: Context
    ) -> Pass:
        """Run tokens at positions start, start + 1, ...; `adapter` acts on all but keys, values."""
        positions = torch.arange(start, start + len(token_ids))
        hidden = self.embed(token_ids)
        inputs, entering = [], []
        for layer in range(self.num_layers):
            entering.append(hidden)
            x = self.layer_input(layer, hidden)
            inputs.append(x)
            keys, values = context(layer, x)
            hidden = self.layer_output(layer, hidden, positions, adapter, keys, values)
        return Pass(inputs, self._logits(hidden), entering)

    # --- one layer at a time, for passes that run some of them -------------------------------------

    def embed(self, token_ids: Sequence[int]) -> Tensor:
        return self._embed(torch.tensor(token_ids, dtype=torch.long))

    def layer_input(self, layer: int, hidden: Tensor) -> Tensor:
        """X of the tokens whose hidden states enter a layer."""
        return self._norm(hidden, f"model.layers.{layer}.input_layernorm")

    def layer_output(
        self,
        layer: int,
        hidden: Tensor,
        positions: Tensor,
        adapter: AdapterDict,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """Hidden states of tokens at any `positions`, given keys and values of the whole context."""
        x = self.layer_input(layer, hidden)
        attended = self._attention(layer, x, positions, adapter, keys, values)
        return self._add_residuals(layer, hidden, attended, adapter)

    def keys_at(self, layer: int, x: Tensor, positions: Tensor, adapter: AdapterDict) -> Tensor:
        """RoPE(x W_k) of tokens at any `positions`: [num_kv_heads, num_tokens, head_dim]."""
        k = self._split_heads(self._linear(layer, "k_proj", x, adapter))
        return self.rope(layer, self._head_norm(layer, "k_norm", k), positions)

    def attention_weights(
        self, layer: int, hidden: Tensor, positions: Tensor, adapter: AdapterDict, keys: Tensor
    ) -> Tensor:
        """softmax weights of tokens over the context: [num_heads, num_tokens, context_len]."""
        return self._weights(layer, self.layer_input(layer, hidden), positions, adapter, keys)

    # --- what the policies store -----------------------------------------------------------------

    def keys(self, layer: int, x: Tensor, start: int, adapter: AdapterDict) -> Tensor:
        """RoPE(x W_k), with the key LoRA folded in: [num_kv_heads, num_tokens, head_dim]."""
        return self.keys_at(layer, x, torch.arange(start, start + len(x)), adapter)

    def values(self, layer: int, x: Tensor, adapter: AdapterDict) -> Tensor:
        """x W_v, with the value LoRA folded in: [num_kv_heads, num_tokens, head_dim]."""
        return self._split_heads(self._linear(layer, "v_proj", x, adapter))

    def lora_keys(self, layer: int, z: Tensor, start: int, adapter: AdapterDict) -> Tensor:
        """What a key strip z adds to the base keys: RoPE(s z B_k)."""
        lora = adapter[layer, "k_proj"]
        delta = self._split_heads(lora.scaling * (z @ lora.b.T))
        return self.rope(layer, delta, torch.arange(start, start + len(z)))

    def lora_values(self, layer: int, z: Tensor, adapter: AdapterDict) -> Tensor:
        """What a value strip z adds to the base values: s z B_v."""
        lora = adapter[layer, "v_proj"]
        return self._split_heads(lora.scaling * (z @ lora.b.T))

    # --- one layer -------------------------------------------------------------------------------

    def _attention(
        self,
        layer: int,
        x: Tensor,
        positions: Tensor,
        adapter: AdapterDict,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        weights = self._weights(layer, x, positions, adapter, keys)
        values = values.repeat_interleave(weights.shape[0] // values.shape[0], dim=0)
        attended = (weights @ values).transpose(0, 1).flatten(1)
        return self._linear(layer, "o_proj", attended, adapter)

    def _weights(
        self, layer: int, x: Tensor, positions: Tensor, adapter: AdapterDict, keys: Tensor
    ) -> Tensor:
        q = self._split_heads(self._linear(layer, "q_proj", x, adapter))
        q = self.rope(layer, self._head_norm(layer, "q_norm", q), positions)
        keys = keys.repeat_interleave(q.shape[0] // keys.shape[0], dim=0)
        scores = q @ keys.transpose(1, 2) * self._score_scale()
        softcap = self._attention_softcap()
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        visible = self._visible(layer, positions, keys.shape[1])
        return scores.masked_fill(~visible, -math.inf).softmax(dim=-1)

    def _visible(self, layer: int, positions: Tensor, context_len: int) -> Tensor:
        """Which key positions each query sees: [num_tokens, context_len], True = seen."""
        distance = positions[:, None] - torch.arange(context_len)[None, :]
        visible = distance >= 0
        window = self._window(layer)
        return visible if window is None else visible & (distance < window)

    def _add_residuals(
        self, layer: int, hidden: Tensor, attended: Tensor, adapter: AdapterDict
    ) -> Tensor:
        prefix = f"model.layers.{layer}."
        if self.is_gemma:  # norms on both sides of each sub-layer
            hidden = hidden + self._norm(attended, prefix + "post_attention_layernorm")
            mlp_input = self._norm(hidden, prefix + "pre_feedforward_layernorm")
            mlp_output = self._mlp(layer, mlp_input, adapter)
            return hidden + self._norm(mlp_output, prefix + "post_feedforward_layernorm")
        hidden = hidden + attended
        mlp_input = self._norm(hidden, prefix + "post_attention_layernorm")
        return hidden + self._mlp(layer, mlp_input, adapter)

    def _mlp(self, layer: int, x: Tensor, adapter: AdapterDict) -> Tensor:
        gate = self._linear(layer, "gate_proj", x, adapter)
        gate = gelu(gate, approximate="tanh") if self.is_gemma else silu(gate)
        up = self._linear(layer, "up_proj", x, adapter)
        return self._linear(layer, "down_proj", gate * up, adapter)

    # --- parts -----------------------------------------------------------------------------------

    def _embed(self, token_ids: Tensor) -> Tensor:
        scale = math.sqrt(self.config.hidden_size) if self.is_gemma else 1.0
        return scale * self.weights["model.embed_tokens.weight"][token_ids]

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self._norm(hidden, "model.norm") @ self.weights["lm_head.weight"].T
        softcap = getattr(self.config, "final_logit_softcapping", None)
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    def _linear(self, layer: int, target: str, x: Tensor, adapter: AdapterDict) -> Tensor:
        block = "mlp" if target in ("gate_proj", "up_proj", "down_proj") else "self_attn"
        name = f"model.layers.{layer}.{block}.{target}"
        y = x @ self.weights[f"{name}.weight"].T
        if f"{name}.bias" in self.weights:
            y = y + self.weights[f"{name}.bias"]
        if (layer, target) in adapter:
            a, b, scaling = adapter[layer, target]
            y = y + scaling * (x @ a.T) @ b.T
        return y

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        x = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + self.config.rms_norm_eps)
        return x * (1.0 + weight) if self.is_gemma else x * weight

    def _head_norm(self, layer: int, which: str, x: Tensor) -> Tensor:
        name = f"model.layers.{layer}.self_attn.{which}"
        return self._norm(x, name) if f"{name}.weight" in self.weights else x

    def _split_heads(self, x: Tensor) -> Tensor:
        """[num_tokens, num_heads * head_dim] -> [num_heads, num_tokens, head_dim]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(0, 1)

    def rope(self, layer: int, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate the pairs (i, i + head_dim / 2) of x [num_heads, num_tokens, head_dim]."""
        angles = positions[:, None].float() * self._inverse_frequencies(layer)[None, :]
        cos, sin = angles.cos(), angles.sin()
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def _inverse_frequencies(self, layer: int) -> Tensor:
        parameters = self.config.rope_parameters
        if "rope_theta" not in parameters:  # gemma3: one set per layer type
            parameters = parameters[self.config.layer_types[layer]]
        exponents = torch.arange(0, self.head_dim, 2).float() / self.head_dim
        frequencies = 1.0 / parameters["rope_theta"] ** exponents
        if parameters["rope_type"] == "linear":
            return frequencies / parameters["factor"]
        if parameters["rope_type"] == "llama3":
            return _llama3_frequencies(frequencies, parameters)
        return frequencies

    def _window(self, layer: int) -> int | None:
        layer_types = getattr(self.config, "layer_types", None)
        if layer_types is not None and layer_types[layer] == "full_attention":
            return None
        return getattr(self.config, "sliding_window", None)

    def _score_scale(self) -> float:
        return (self.config.query_pre_attn_scalar if self.is_gemma else self.head_dim) ** -0.5

    def _attention_softcap(self) -> float | None:
        return self.config.attn_logit_softcapping if self.config.model_type == "gemma2" else None


def _llama3_frequencies(frequencies: Tensor, parameters: dict[str, float]) -> Tensor:
    """Slow rotations divided by `factor`, fast ones kept, a linear blend between."""
    turns = parameters["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return keep * frequencies + (1.0 - keep) * frequencies / parameters["factor"]
