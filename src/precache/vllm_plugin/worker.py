"""The worker's side: room for the strips in the cache, a check that every layer has them, and the moves of a step."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from precache.errors import ModelError
from precache.vllm_plugin.activation import install_cpu_worker_hooks, install_cuda_worker_hooks
from precache.vllm_plugin.settings import parse_settings
from precache.vllm_plugin.strips import StripMoves, StripStep, widen_spec


class SharingWorker(Worker):
    """What the plugin adds to vLLM's workers, all of which are made from its GPU worker."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        settings = parse_settings(vllm_config.additional_config)
        assert settings is not None, "only engines that ask for the plugin get this worker"
        self.install_hooks()
        self._policy = settings.policy
        self._step = StripStep()
        super().__init__(vllm_config, *args, **kwargs)

    def install_hooks(self) -> None:
        """Register what the device needs, before the model is made."""
        raise NotImplementedError

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if self._policy.strips:
            for name, layer in self._attention_layers().items():
                if layer.impl.projection is None:
                    raise ModelError(
                        f"{self.model_config.model}: {name} reads a projection without value LoRA. The policy needs "
                        "models with one fused q, k, v projection per attention layer, and q_proj and v_proj among "
                        "--lora-target-modules if that is given"
                    )
                layer.impl.step = self._step

    def get_kv_cache_spec(self) -> dict[str, Any]:
        specs: dict[str, Any] = super().get_kv_cache_spec()
        if not self._policy.strips:
            return specs
        lora = self.vllm_config.lora_config
        return {
            name: widen_spec(spec, lora.max_loras, lora.max_lora_rank)
            for name, spec in specs.items()
        }

    def execute_model(self, scheduler_output: Any) -> Any:
        self._step.where = None
        self._step.moves = [
            StripMoves(self._slot_of(lora_id), torch.tensor(src), torch.tensor(dst))
            for lora_id, src, dst in getattr(scheduler_output, "precache_moves", ())
        ]
        return super().execute_model(scheduler_output)

    def _slot_of(self, lora_id: int) -> int:
        manager = self.model_runner.lora_manager._adapter_manager
        slot: int = manager.lora_index_to_id.index(lora_id)
        return slot

    def _attention_layers(self) -> dict[str, Any]:
        from vllm.config import get_layers_from_vllm_config
        from vllm.model_executor.layers.attention import Attention

        layers: dict[str, Any] = get_layers_from_vllm_config(self.vllm_config, Attention)
        return layers


class SharingCPUWorker(SharingWorker, CPUWorker):
    """vLLM's CPU worker under a policy of the plugin."""

    def install_hooks(self) -> None:
        install_cpu_worker_hooks()


class SharingCUDAWorker(SharingWorker):
    """EXPERIMENTAL, never run on a GPU: model runner V1, one step after the other, no captured graphs."""

    def install_hooks(self) -> None:
        install_cuda_worker_hooks()
