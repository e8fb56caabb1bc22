"""What of vLLM does not go with the plugin, found before an engine starts and named all at once."""

from __future__ import annotations

import platform
from collections.abc import Collection, Iterator
from typing import Any

from precache.errors import PrecacheError
from precache.vllm_plugin.settings import PluginSettings

STRIP_MACHINES = ("x86_64", "amd64")
_STOCK_WORKERS = (
    "auto",
    "vllm.v1.worker.cpu_worker.CPUWorker",
    "vllm.v1.worker.gpu_worker.Worker",
)


class UnsupportedVllmSettingsError(PrecacheError):
    """vLLM was configured in a way that the plugin cannot serve; all that is in the way is named."""

    def __init__(self, policy: str, problems: list[str]) -> None:
        self.policy = policy
        self.problems = problems
        super().__init__(
            f"policy {policy!r} cannot run with these vLLM settings: " + "; ".join(problems)
        )


def find_problems(config: Any, settings: PluginSettings, own_classes: Collection[str]) -> list[str]:
    """Everything in a VllmConfig that the policy cannot run with, one clause each; empty when it can."""
    return [
        *_device_problems(config, settings),
        *_lora_problems(config),
        *_cache_problems(config),
        *_model_problems(config, settings),
        *_engine_problems(config, own_classes),
    ]


def _device_problems(config: Any, settings: PluginSettings) -> Iterator[str]:
    device = config.device_config.device_type
    if device == "cuda":
        yield from _cuda_problems(config, settings)
    elif device != "cpu":
        yield (
            f"device {device!r}: the plugin's attention backends are for CPUs and, as an experiment, for CUDA; "
            "run vLLM without the plugin, or precache's transformers engine"
        )
    elif settings.policy.strips and platform.machine().lower() not in STRIP_MACHINES:
        yield (
            f"machine {platform.machine()!r}: how vLLM lays values out is known for {STRIP_MACHINES[0]} only, "
            "policies nonshared and fullshared run"
        )


def _cuda_problems(config: Any, settings: PluginSettings) -> Iterator[str]:
    if not settings.experimental_cuda:
        yield (
            "device 'cuda': the plugin's CUDA backend is experimental, nobody has run it on a GPU yet; "
            '"experimental_cuda": true beside the policy tries it, precache\'s transformers engine runs without'
        )
        return
    backend = config.attention_config.backend
    if getattr(backend, "name", None) != "TRITON_ATTN":
        yield f"attention backend: got {getattr(backend, 'name', 'auto')}, needed is --attention-backend TRITON_ATTN"
    if not config.model_config.enforce_eager:
        yield "enforce_eager: got False, needed is True: strips are not written in captured graphs"
    if config.use_v2_model_runner:
        yield "model runner V2: needed is VLLM_USE_V2_MODEL_RUNNER=0"


def _lora_problems(config: Any) -> Iterator[str]:
    lora = config.lora_config
    if lora is None:
        yield "enable_lora: got False, needed is True"
        return
    if lora.fully_sharded_loras:
        yield "fully_sharded_loras: X A has to be whole on every rank"
    if lora.max_cpu_loras != lora.max_loras:
        yield (
            f"max_cpu_loras: got {lora.max_cpu_loras}, allowed is max_loras={lora.max_loras}, "
            "so that no adapter leaves its slot behind the scheduler's back"
        )
    if lora.default_mm_loras or lora.enable_tower_connector_lora:
        yield "LoRA for other modalities (default_mm_loras, enable_tower_connector_lora)"


def _cache_problems(config: Any) -> Iterator[str]:
    cache = config.cache_config
    if not cache.enable_prefix_caching:
        yield "enable_prefix_caching: got False, needed is True"
    if cache.cache_dtype not in ("auto", "bfloat16", "float16"):
        yield f"kv_cache_dtype: got {cache.cache_dtype!r}, allowed is an unquantised one"
    if getattr(cache, "kv_sharing_fast_prefill", False):
        yield "kv_sharing_fast_prefill"
    if config.kv_transfer_config is not None:
        yield "kv_transfer_config: a connector would move blocks without their strips"


def _model_problems(config: Any, settings: PluginSettings) -> Iterator[str]:
    model = config.model_config
    if model.runner_type != "generate":
        yield f"runner {model.runner_type!r}: only text generation is supported"
    for what, found in (
        ("an encoder-decoder model", model.is_encoder_decoder),
        ("a diffusion model", getattr(model, "is_diffusion", False)),
        ("multi-head latent attention", model.use_mla),
        ("a hybrid or state-space model", model.is_hybrid or model.has_inner_state),
    ):
        if found:
            yield f"{model.model}: {what}"
    if settings.policy.strips and model.get_sliding_window() is not None:
        yield f"{model.model}: sliding-window attention"


def _engine_problems(config: Any, own_classes: Collection[str]) -> Iterator[str]:
    parallel, scheduler = config.parallel_config, config.scheduler_config
    if config.speculative_config is not None:
        yield "speculative_config: drafted tokens are not known to the strips"
    if getattr(parallel, "pipeline_parallel_size", 1) != 1:
        yield "pipeline_parallel_size: vLLM's CPU runner fails at the first step of a pipeline with LoRA"
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            yield f"{name}: got {getattr(parallel, name)}, allowed is 1"
    if scheduler.async_scheduling:
        yield "async_scheduling: the plugin extends the synchronous scheduler only"
    if parallel.enable_dbo:
        yield "enable_dbo: two half batches have no single slot mapping"
    if scheduler.scheduler_cls is not None and scheduler.scheduler_cls not in own_classes:
        yield f"scheduler_cls: got {scheduler.scheduler_cls!r}, the plugin brings its own"
    if parallel.worker_cls not in _STOCK_WORKERS and parallel.worker_cls not in own_classes:
        yield f"worker_cls: got {parallel.worker_cls!r}, the plugin brings its own"
