"""Every vLLM symbol that the plugin uses and vLLM does not promise to keep, in one place.

`require_compatible` compares version and signatures with what the plugin was written for, before an engine that asked
for the plugin starts. The other modules of the plugin override, wrap or call exactly what is listed here.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any, NamedTuple

from precache.errors import PrecacheError

SUPPORTED_MINOR = (0, 32)


class IncompatibleVllmError(PrecacheError):
    """This vLLM is not the one that the plugin was written for."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__(
            f"precache's vLLM plugin needs vllm>={_SUPPORTED}.0,<{SUPPORTED_MINOR[0]}.{SUPPORTED_MINOR[1] + 1}: "
            + "; ".join(problems)
        )


class Private(NamedTuple):
    """A function by module and name, and the parameters it has to have, in order; or a plain object (None)."""

    module: str
    name: str
    parameters: str | None


_SUPPORTED = ".".join(map(str, SUPPORTED_MINOR))
_SCHEDULER = "vllm.v1.core.sched.scheduler"
_MANAGER = "vllm.v1.core.kv_cache_manager"
_LORA = "vllm.lora.layers.column_parallel_linear"
_PUNICA = "vllm.lora.punica_wrapper.punica_cpu"
_CPU = "vllm.v1.attention.backends.cpu_attn"
_OPS = "vllm._custom_ops"
_TRITON = "vllm.v1.attention.backends.triton_attn"

PRIVATE = (
    # wrapped, by activation.py
    Private("vllm.config", "VllmConfig.__post_init__", "self"),
    Private("vllm.v1.engine.core", "EngineCore.add_lora", "self lora_request"),
    Private("vllm.v1.engine.core", "EngineCore.remove_lora", "self lora_id"),
    Private("vllm.v1.engine.core", "EngineCore.add_request", "self request request_wave"),
    Private("vllm.platforms.cpu", "CpuPlatform.get_punica_wrapper", ""),
    Private("vllm.lora.utils", "_all_lora_classes", None),
    # overridden, by scheduler.py
    Private(_SCHEDULER, "Scheduler.schedule", "self throttle_prefills"),
    Private(
        _SCHEDULER,
        "Scheduler.update_from_output",
        "self scheduler_output model_runner_output",
    ),
    Private(_SCHEDULER, "Scheduler.add_request", "self request"),
    Private(_SCHEDULER, "Scheduler.finish_requests", "self request_ids finished_status"),
    Private(_SCHEDULER, "Scheduler._free_request_blocks", "self request"),
    Private(
        _SCHEDULER,
        "Scheduler._preempt_request",
        "self request timestamp drop_stale_output",
    ),
    Private(_SCHEDULER, "Scheduler._handle_blocked_waiting_request", "self request"),
    # called or replaced on an instance, by scheduler.py and shadows.py
    Private(_MANAGER, "KVCacheManager.pop_blocks_for_free", "self request"),
    Private(_MANAGER, "KVCacheManager.evict_blocks", "self block_ids"),
    Private(_MANAGER, "KVCacheManager.get_block_ids", "self request_id"),
    Private(_MANAGER, "KVCacheManager.record_prefix_cache_stats", "self request num_hits"),
    Private(
        "vllm.v1.core.kv_cache_coordinator",
        "KVCacheCoordinator.cache_blocks",
        "self request num_computed_tokens",
    ),
    Private(
        "vllm.v1.core.block_pool",
        "BlockPool.get_cached_block",
        "self block_hash kv_cache_group_ids",
    ),
    Private("vllm.v1.core.block_pool", "BlockPool.free_blocks", "self ordered_blocks"),
    Private("vllm.v1.request", "Request.update_block_hashes", "self"),
    # subclassed, by the workers, layers and backends
    Private("vllm.v1.worker.gpu_worker", "Worker.load_model", "self load_dummy_weights"),
    Private("vllm.v1.worker.gpu_worker", "Worker.get_kv_cache_spec", "self"),
    Private("vllm.v1.worker.gpu_worker", "Worker.execute_model", "self scheduler_output"),
    Private("vllm.v1.worker.cpu_worker", "CPUWorker.load_model", "self load_dummy_weights"),
    Private("vllm.v1.worker.cpu_worker", "CPUWorker.get_kv_cache_spec", "self"),
    Private("vllm.v1.worker.cpu_worker", "CPUWorker.execute_model", "self scheduler_output"),
    Private(
        _LORA,
        "MergedQKVParallelLinearWithLoRA.create_lora_weights",
        "self max_loras lora_config model_config",
    ),
    Private(_LORA, "MergedQKVParallelLinearWithLoRA._apply_lora_to_output", "self x output"),
    Private(
        _PUNICA,
        "PunicaWrapperCPU.update_metadata",
        "self mapping lora_index_to_id max_loras vocab_size kwargs",
    ),
    Private(
        _PUNICA,
        "PunicaWrapperCPU.add_lora_linear",
        "self y x lora_a_stacked lora_b_stacked scale output_slices buffer kwargs",
    ),
    Private(
        _PUNICA,
        "PunicaWrapperCPU.add_lora_logits",
        "self y x lora_a_stacked lora_b_stacked scale buffer kwargs",
    ),
    Private(
        _PUNICA,
        "PunicaWrapperCPU.add_lora_embedding",
        "self y x lora_b_stacked add_inputs kwargs",
    ),
    Private(
        _CPU,
        "CPUAttentionBackendImpl.forward",
        "self layer query key value kv_cache attn_metadata output output_scale output_block_scale",
    ),
    Private(
        _CPU,
        "CPUAttentionBackendImpl.do_kv_cache_update",
        "self layer key value kv_cache slot_mapping",
    ),
    Private(
        _TRITON,
        "TritonAttentionImpl.forward",
        "self layer query key value kv_cache attn_metadata output output_scale output_block_scale",
    ),
    Private(
        _TRITON,
        "TritonAttentionImpl.do_kv_cache_update",
        "self layer key value kv_cache slot_mapping",
    ),
    Private(_CPU, "CPUAttentionMetadataBuilder._set_isa_to_layers", "self layer_names"),
    Private(
        _OPS,
        "cpu_attn_get_scheduler_metadata",
        "num_reqs num_heads num_kv_heads head_dim seq_lens dtype query_start_loc causal sliding_window_size isa "
        "enable_kv_split dynamic_causal kv_cache_dtype",
    ),
    Private(
        _OPS,
        "cpu_attention_with_kv_cache",
        "query key_cache value_cache output query_start_loc seq_lens scale causal alibi_slopes sliding_window "
        "block_table softcap scheduler_metadata s_aux dynamic_causal k_scale v_scale kv_cache_dtype",
    ),
)


def require_compatible() -> None:
    """Raise IncompatibleVllmError, naming everything that differs from the vLLM the plugin was written for."""
    import vllm

    if problem := _version_problem(vllm.__version__):
        raise IncompatibleVllmError([problem])
    problems = [found for symbol in PRIVATE if (found := _symbol_problem(symbol))]
    if problems:
        raise IncompatibleVllmError(problems)


def _version_problem(version: str) -> str | None:
    parts = version.split(".")
    if tuple(parts[:2]) == tuple(map(str, SUPPORTED_MINOR)):
        return None
    return f"got vllm {version}"


def _symbol_problem(symbol: Private) -> str | None:
    where = f"{symbol.module}.{symbol.name}"
    try:
        found: Any = importlib.import_module(symbol.module)
        for part in symbol.name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        return f"{where} is not there ({error})"
    if symbol.parameters is None:
        return None
    wanted = symbol.parameters.split()
    got = list(inspect.signature(inspect.unwrap(found)).parameters)
    return None if got == wanted else f"{where} takes {got}, expected is {wanted}"
