"""The base model: loads it through transformers, checks that it is supported, and drives it layer by layer.

The engine walks the decoder layers itself instead of calling the whole model. So a pass can stop at the last layer's
k and v, and the last layer and the head run only for the rows whose logits somebody reads.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from precache.adapters.bank import AdapterBank
from precache.adapters.spec import TARGETS, ModelShape
from precache.cache.layout import CacheLayout
from precache.config import EngineConfig
from precache.engine.checkpoints import hub_id, resolve_model
from precache.engine.forward import Forward, KeyValuesStored, Lane
from precache.engine.hooks import (
    ATTENTION_NAME,
    RunningForward,
    install_projections,
    register_attention,
    run_layer,
)
from precache.engine.products import Products
from precache.engine.work import Work
from precache.errors import ConfigError, ModelError, UnsupportedModelError
from precache.ops import BackendUnavailableError, UnknownBackendError, choose_backend

SUPPORTED = ("llama", "mistral", "ministral", "qwen2", "qwen3", "gemma2", "gemma3_text")
KEY_NORMS = ("qwen3", "gemma3_text")  # k is normalised: base + low-rank part is no longer linear
# Rotary tables that do not depend on the context length.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
NAMED_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_DIGEST_SAMPLES = 4096  # values per weight
_DIGEST_FACTS = (
    "model_type",
    "vocab_size",
    "rope_parameters",
    "rms_norm_eps",
    "hidden_act",
    "sliding_window",
    "layer_types",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "query_pre_attn_scalar",
)
_NO_ROWS = 0


class BackboneModel:
    """A supported transformers model with its projections replaced, and the facts the rest of the engine needs."""

    def __init__(
        self, model: nn.Module, config: PreTrainedConfig, names: tuple[str, ...], backend: str
    ) -> None:
        check_supported(config)
        self.config = config
        self.model = model.eval()
        self.decoder = cast(Any, model.get_submodule("model"))
        self.head = model.get_submodule("lm_head")
        weight = self.decoder.embed_tokens.weight
        self.dtype: torch.dtype = weight.dtype
        self.device: torch.device = weight.device
        self.shape = model_shape_from_config(config, names)
        self.layout = CacheLayout(
            self.shape.num_layers,
            self.shape.num_kv_heads,
            self.shape.head_dim,
            self.dtype,
            self.device,
        )
        self.context_window = int(config.max_position_embeddings)
        self.eos_token_ids = _eos_token_ids(model)
        self.key_norms = config.model_type in KEY_NORMS
        self._backend = backend
        self._products = Products(weight)
        self._running = RunningForward()
        self._forward_lock = threading.Lock()  # engines that share the model run one at a time
        self._layer_types = _layer_types(config)
        self._rope: dict[str, tuple[Tensor, Tensor]] = {}
        self._softcap = getattr(config, "final_logit_softcapping", None)
        if self.device.type == "cpu" and self.dtype == torch.float32:
            store_wide_weights_by_column(model)
        install_projections(self.decoder.layers, dict(self.shape.out_features), self._running)

    @classmethod
    def load(cls, name: str, config: EngineConfig) -> BackboneModel:
        """Load a hub id, a local folder or the alias ``smollm2``.

        Raises UnsupportedModelError for an architecture that cannot work, ModelError if nothing can be loaded, and
        ConfigError for a device or an attention backend that is not there.
        """
        device = resolve_device(config.device)
        dtype = resolve_dtype(config.dtype, device)
        backend = resolve_backend(config.attention_backend, device, dtype)
        register_attention()
        path = resolve_model(name)
        try:
            model_config = AutoConfig.from_pretrained(path)
            check_supported(model_config)
            model = AutoModelForCausalLM.from_pretrained(
                path,
                config=model_config,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                use_safetensors=True,  # never a pickle
            )
        except (OSError, ValueError, SafetensorError) as error:
            raise ModelError(f"model {name!r} cannot be loaded: {error}") from error
        names = tuple(dict.fromkeys((hub_id(name), path, name)))
        moved = cast(nn.Module, model).to(device)
        return cls(moved, model_config, names, backend)

    # -- running -------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(self, lanes: Sequence[Lane], bank: AdapterBank, work: Work) -> Tensor:
        """Run the lanes and return the logits [sum of lane.logits, vocab], fp32, in lane order.

        What the lanes write is in the buffers afterwards; committing it is the caller's. ``work`` counts what it took.
        """
        forward = self.start(lanes, bank, work)
        hidden_states = self.embed(forward)
        rope = self.rope(hidden_states, forward)
        last = self.shape.num_layers - 1
        with self.running(forward):
            for index in range(last):
                hidden_states = self.run_layer(index, hidden_states, rope, forward)
            forward.keep_hidden(last, hidden_states)
            hidden_states = self._run_last(hidden_states, rope, lanes, forward, bank)
            return self._logits(hidden_states, work)  # the products' workspace is the model's

    def start(
        self,
        lanes: Sequence[Lane],
        bank: AdapterBank,
        work: Work,
        *,
        keys_values_only: bool = False,
    ) -> Forward:
        """A pass over the lanes that has not run anything."""
        return Forward(
            lanes,
            bank,
            self.rope_tables,
            self._backend,
            self._products,
            work,
            keys_values_only=keys_values_only,
        )

    @contextmanager
    def running(self, forward: Forward) -> Iterator[None]:
        """Make ``forward`` the pass that the projections see. One runs at a time."""
        with self._forward_lock:
            try:
                self._running.current = forward
                yield
            finally:
                self._running.current = None

    def embed(self, forward: Forward) -> Tensor:
        """The hidden states [1, rows, hidden] that enter the first layer."""
        token_ids = torch.tensor([forward.token_ids()], device=self.device)
        embedded: Tensor = self.decoder.embed_tokens(token_ids)
        return embedded

    def run_layer(
        self,
        index: int,
        hidden_states: Tensor,
        rope: dict[str, tuple[Tensor, Tensor]],
        forward: Forward,
    ) -> Tensor:
        """One layer over [1, rows, hidden], within ``running``."""
        forward.keep_hidden(index, hidden_states)
        layer = self.decoder.layers[index]
        return run_layer(layer, hidden_states, rope[self._layer_types[index]], forward)

    def values(self, index: int, hidden_states: Tensor) -> Tensor:
        """What v_proj of a layer makes of [1, rows, hidden], within ``running``: [1, rows, num_kv_heads * head_dim]."""
        layer = self.decoder.layers[index]
        projected: Tensor = layer.self_attn.v_proj(layer.input_layernorm(hidden_states))
        return projected

    def _run_last(
        self,
        hidden_states: Tensor,
        rope: dict[str, tuple[Tensor, Tensor]],
        lanes: Sequence[Lane],
        forward: Forward,
        bank: AdapterBank,
    ) -> Tensor:
        """The last layer: only k and v for the rows that need no logits, everything for the others."""
        layer = self.decoder.layers[-1]
        cos, sin = rope[self._layer_types[-1]]
        heads, tails = _split_rows(forward)
        if heads:
            self._running.current = self.start(
                [lane.head() for lane in lanes], bank, forward.work, keys_values_only=True
            )
            with suppress(KeyValuesStored):
                run_layer(
                    layer,
                    _rows(hidden_states, heads),
                    (_rows(cos, heads), _rows(sin, heads)),
                    self._running.current,
                )
        if not tails:
            return hidden_states[:, :_NO_ROWS]
        if heads:
            hidden_states = _rows(hidden_states, tails)
            cos, sin = _rows(cos, tails), _rows(sin, tails)
        with_logits = [lane.tail() for lane in lanes if lane.logits]
        self._running.current = self.start(with_logits, bank, forward.work)
        return run_layer(layer, hidden_states, (cos, sin), self._running.current)

    def _logits(self, hidden_states: Tensor, work: Work) -> Tensor:
        if hidden_states.shape[1] == _NO_ROWS:
            return torch.empty((0, self.shape.vocab_size), device=self.device)
        work.add_product(hidden_states.shape[1], hidden_states.shape[2], self.shape.vocab_size)
        logits = self._products.apply(self.head, self.decoder.norm(hidden_states))[0].float()
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    # -- rotary embeddings ---------------------------------------------------------------------------------------

    def rope(self, hidden_states: Tensor, forward: Forward) -> dict[str, tuple[Tensor, Tensor]]:
        """Per layer type cos and sin [1, rows, head_dim] of the rows of a pass."""
        positions = torch.tensor([forward.positions()], device=self.device)
        return {kind: self._rotary(hidden_states, positions, kind) for kind in self._rope_kinds()}

    def _rope_kinds(self) -> list[str]:
        return sorted(set(self._layer_types))

    def _rotary(self, like: Tensor, positions: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        arguments = (kind,) if self.config.model_type == "gemma3_text" else ()
        cos, sin = self.decoder.rotary_emb(like, positions, *arguments)
        return cos, sin

    def rope_tables(self, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin [length, head_dim] of the positions 0 to ``length`` for a layer; computed once and grown."""
        kind = self._layer_types[layer]
        if kind not in self._rope or self._rope[kind][0].shape[0] < length:
            rounded = -(-length // 1024) * 1024
            positions = torch.arange(rounded, device=self.device).unsqueeze(0)
            like = torch.empty(0, dtype=self.dtype, device=self.device)
            cos, sin = self._rotary(like, positions, kind)
            self._rope[kind] = cos[0], sin[0]
        cos, sin = self._rope[kind]
        return cos[:length], sin[:length]

    # -- identity ------------------------------------------------------------------------------------------------

    def digest(self) -> str:
        """SHA-256 over the config and an even sample of every weight: tells models apart without reading all bytes."""
        sha = hashlib.sha256(b"precache-model-1")
        facts = {key: getattr(self.config, key, None) for key in _DIGEST_FACTS}
        sha.update(json.dumps(facts, sort_keys=True, default=str).encode())
        for name, parameter in sorted(self.model.named_parameters()):
            sha.update(f"{name}{tuple(parameter.shape)}".encode())
            flat = parameter.detach().reshape(-1)
            step = max(1, flat.numel() // _DIGEST_SAMPLES)
            sha.update(flat[::step].float().cpu().numpy().tobytes())
        return sha.hexdigest()


def model_shape_from_config(config: PreTrainedConfig, names: tuple[str, ...] = ()) -> ModelShape:
    """What adapters must fit, from a transformers config alone. Raises UnsupportedModelError."""
    check_supported(config)
    hidden, heads = config.hidden_size, config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    inner = config.intermediate_size
    widths = {
        "q_proj": (hidden, heads * head_dim),
        "k_proj": (hidden, kv_heads * head_dim),
        "v_proj": (hidden, kv_heads * head_dim),
        "o_proj": (heads * head_dim, hidden),
        "gate_proj": (hidden, inner),
        "up_proj": (hidden, inner),
        "down_proj": (inner, hidden),
    }
    return ModelShape(
        num_layers=config.num_hidden_layers,
        in_features={target: widths[target][0] for target in TARGETS},
        out_features={target: widths[target][1] for target in TARGETS},
        vocab_size=config.vocab_size,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        base_names=names,
    )


def check_supported(config: PreTrainedConfig) -> None:
    """Raise UnsupportedModelError, in a sentence that says what is supported, if the model cannot work."""
    if config.model_type not in SUPPORTED:
        raise UnsupportedModelError(
            f"model type {config.model_type!r} is not supported: allowed are {', '.join(SUPPORTED)} "
            "(separate q, k and v projections, rotary positions)"
        )
    for rope_type in _rope_types(config):
        if rope_type not in ROPE_TYPES:
            raise UnsupportedModelError(
                f"rope type {rope_type!r} is not supported: cached keys must not depend on the context length; "
                f"allowed are {', '.join(ROPE_TYPES)}"
            )
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedModelError(
            "use_bidirectional_attention=true is not supported: only causal attention can be cached"
        )


def _rope_types(config: PreTrainedConfig) -> list[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        return [parameters["rope_type"]]
    return [item["rope_type"] for item in parameters.values() if isinstance(item, dict)]


def _layer_types(config: PreTrainedConfig) -> list[str]:
    """The kind of every layer's rotary table: one for all, except where local layers have their own."""
    if config.model_type == "gemma3_text":
        return list(config.layer_types)
    return ["all"] * int(config.num_hidden_layers)


def resolve_device(name: str) -> torch.device:
    """``auto`` is CUDA, then MPS, then the CPU. Raises ConfigError for a device that is not there."""
    if name != "auto":
        try:
            return torch.empty(0, device=name).device
        except (RuntimeError, AssertionError) as error:
            raise ConfigError("device", name, "auto or an available torch device") from error
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """``auto`` is bfloat16, except on CPUs without fast bfloat16 products, where it is float32."""
    if name != "auto":
        return NAMED_DTYPES[name]
    slow = device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.float32 if slow else torch.bfloat16


def resolve_backend(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """The attention backend that ``name`` stands for here. Raises ConfigError for one that cannot run."""
    try:
        return choose_backend(name, device, dtype)
    except UnknownBackendError as error:
        raise ConfigError("attention_backend", name, f"one of {error.known}") from error
    except BackendUnavailableError as error:
        allowed = f"auto or cpu: {error.reason}"
        raise ConfigError("attention_backend", name, allowed) from error


def store_wide_weights_by_column(model: nn.Module) -> None:
    """Lay the weights of Linear modules that widen their input out column by column; their values stay.

    A product with one row, which is a decode step, then takes half to two thirds of the time in the BLAS of a CPU (more
    rows: the same). Where the embedding is tied to the head it stays tied.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.out_features > module.in_features:
            module.weight.data = module.weight.data.t().contiguous().t()


def _eos_token_ids(model: nn.Module) -> tuple[int, ...]:
    generation = getattr(model, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (int(eos),)


def _split_rows(forward: Forward) -> tuple[list[int], list[int]]:
    """Rows without and with logits."""
    heads: list[int] = []
    tails: list[int] = []
    for rows, lane in forward.lanes:
        heads += range(rows.start, rows.stop - lane.logits)
        tails += range(rows.stop - lane.logits, rows.stop)
    return heads, tails


def _rows(x: Tensor, rows: list[int]) -> Tensor:
    """Rows of [1, rows, width]; a view where they are consecutive."""
    if rows[-1] - rows[0] + 1 == len(rows):
        return x[:, rows[0] : rows[-1] + 1]
    return x[:, rows]
