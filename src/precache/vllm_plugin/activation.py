"""How an engine comes to run with the plugin: its configuration asks, is checked, and names our scheduler and worker.

Everything else hangs on those two classes, which vLLM loads in the processes where they belong. The few functions of
vLLM that have to be wrapped are wrapped here, once per process, and pass through for every other engine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from precache.vllm_plugin.compat import require_compatible
from precache.vllm_plugin.rejections import UnsupportedVllmSettingsError, find_problems
from precache.vllm_plugin.settings import PluginSettings, parse_settings

SCHEDULER = "precache.vllm_plugin.scheduler.SharingScheduler"
CPU_WORKER = "precache.vllm_plugin.worker.SharingCPUWorker"
CUDA_WORKER = "precache.vllm_plugin.worker.SharingCUDAWorker"
CPU_BACKEND = "precache.vllm_plugin.backends.cpu.SharingCPUBackend"
CUDA_BACKEND = "precache.vllm_plugin.backends.triton.SharingTritonBackend"
CPU_PUNICA = "precache.vllm_plugin.punica.GroupedPunicaWrapper"

_MARK = "_precache_wrapped"


def watch_configuration() -> None:
    """Wrap VllmConfig.__post_init__, so that a configuration that asks for the plugin is checked when it is made."""
    from vllm.config import VllmConfig

    def wrapper(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def post_init(self: Any) -> None:
            original(self)
            _configure(self)

        return post_init

    _wrap(VllmConfig, "__post_init__", wrapper)


def _configure(vllm_config: Any) -> None:
    """Check an engine's whole configuration and point it to our classes. Raises PrecacheError; nothing has started."""
    settings = parse_settings(vllm_config.additional_config)
    model_config = vllm_config.model_config
    if settings is None or model_config is None or model_config.is_submodel_config:
        return
    require_compatible()
    on_cuda = vllm_config.device_config.device_type == "cuda"
    worker = CUDA_WORKER if on_cuda else CPU_WORKER
    if problems := find_problems(vllm_config, settings, {SCHEDULER, worker}):
        raise UnsupportedVllmSettingsError(settings.policy.name, problems)
    vllm_config.scheduler_config.scheduler_cls = SCHEDULER
    vllm_config.parallel_config.worker_cls = worker


def current_settings() -> PluginSettings | None:
    """The settings of the engine whose layers are being made in this process."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    return None if config is None else parse_settings(config.additional_config)


def install_core_hooks() -> None:
    """Tell our scheduler about adapters that are loaded, removed or needed. Called in the engine core's process."""
    from vllm.v1.engine.core import EngineCore

    def add_lora(original: Callable[..., bool]) -> Callable[..., bool]:
        @functools.wraps(original)
        def wrapped(self: Any, lora_request: Any) -> bool:
            adapters = getattr(self.scheduler, "adapters", None)
            if adapters is None:
                return original(self, lora_request)
            loaded: bool = adapters.load(self.model_executor, lora_request)
            return loaded

        return wrapped

    def remove_lora(original: Callable[..., bool]) -> Callable[..., bool]:
        @functools.wraps(original)
        def wrapped(self: Any, lora_id: int) -> bool:
            adapters = getattr(self.scheduler, "adapters", None)
            if adapters is None:
                return original(self, lora_id)
            removed: bool = adapters.remove(self.model_executor, lora_id)
            return removed

        return wrapped

    def add_request(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def wrapped(self: Any, request: Any, request_wave: int = 0) -> None:
            adapters = getattr(self.scheduler, "adapters", None)
            if adapters is not None:
                adapters.executor = self.model_executor
            original(self, request, request_wave)

        return wrapped

    _wrap(EngineCore, "add_lora", add_lora)
    _wrap(EngineCore, "remove_lora", remove_lora)
    _wrap(EngineCore, "add_request", add_request)


def install_cpu_worker_hooks() -> None:
    """Register attention, projection and LoRA arithmetic for a CPU. Called in a worker's process, before the model."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, CPU_BACKEND)
    _register_projection()

    def get_punica_wrapper(original: Callable[[], str]) -> Any:
        @functools.wraps(original)
        def wrapped(cls: Any) -> str:
            return original() if current_settings() is None else CPU_PUNICA

        return classmethod(wrapped)

    _wrap(CpuPlatform, "get_punica_wrapper", get_punica_wrapper)


def install_cuda_worker_hooks() -> None:
    """Register attention and projection for CUDA; vLLM's own LoRA arithmetic stays. Called before the model."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.TRITON_ATTN, CUDA_BACKEND)
    _register_projection()


def _register_projection() -> None:
    import vllm.lora.utils

    from precache.vllm_plugin.lora_layer import StripProjection

    known = vllm.lora.utils._all_lora_classes
    if StripProjection not in known:
        vllm.lora.utils._all_lora_classes = (StripProjection, *known)


def _wrap(owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
    """Replace a function by a wrapper around it, once."""
    original = getattr(owner, name)
    if getattr(original, _MARK, False):
        return
    wrapped = wrapper(original)
    setattr(getattr(wrapped, "__func__", wrapped), _MARK, True)
    setattr(owner, name, wrapped)
