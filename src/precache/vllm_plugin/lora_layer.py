"""The q, k, v projection of a layer whose values are shared: base values out, X A of every slot to the attention.

Under a policy with strips the value LoRA is not added here. The attention applies it, reading each cached token's
strip; this layer computes the new tokens' strips for all slots in one GEMM and hands them over.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.lora.layers.column_parallel_linear import MergedQKVParallelLinearWithLoRA

from precache.errors import ModelError, PolicyNotAllowedError
from precache.vllm_plugin.activation import current_settings

_Q, _K, _V = range(3)


class StripProjection(MergedQKVParallelLinearWithLoRA):
    """vLLM's LoRA layer for a fused q, k, v projection, under a policy with strips."""

    @classmethod
    def can_replace_layer(cls, *args: Any, **kwargs: Any) -> bool:
        settings = current_settings()
        if settings is None or not settings.policy.strips:
            return False
        replaces: bool = super().can_replace_layer(*args, **kwargs)
        return replaces

    def create_lora_weights(
        self, max_loras: int, lora_config: Any, model_config: Any = None
    ) -> None:
        super().create_lora_weights(max_loras, lora_config, model_config)
        self.num_slots = max_loras
        self.lora_rank: int = lora_config.max_lora_rank
        # The same storage as the stacked A, which set_lora and reset_lora write to.
        self.value_a = self.lora_a_stacked[_V].view(max_loras * self.lora_rank, self.input_size)
        # Scaled B of the values, [slots, num_kv_heads, rank, head_dim], packed as a kernel wants it.
        self.value_b: Tensor = self._value_b().contiguous()
        # Of the running step, [num_rows, slots * rank]; the attention stores it.
        self.new_strips: Tensor | None = None
        attention_below(self.base_layer.prefix).impl.use_strips_of(self)

    def set_lora(self, index: int, lora_a: Any, lora_b: Any) -> None:
        if lora_b[_K] is not None:
            raise PolicyNotAllowedError(
                "strips", "an adapter has LoRA on k_proj, and keys are shared as they are"
            )
        super().set_lora(index, lora_a, lora_b)
        self.value_b[index] = self._value_b()[index]

    def reset_lora(self, index: int) -> None:
        super().reset_lora(index)
        self.value_b[index] = 0

    def _value_b(self) -> Tensor:
        """The values' part of the stacked B, by head."""
        stacked: Tensor = self.lora_b_stacked[_V][:, 0]
        num_slots, _, rank = stacked.shape
        return stacked.view(num_slots, -1, self.base_layer.head_size, rank).transpose(2, 3)

    @property
    def row_slots(self) -> Tensor:
        """The slot of every row of the batch, -1 without an adapter: int64 [num_rows]."""
        slots: Tensor = self.punica_wrapper.token_lora_indices
        return slots

    def _apply_lora_to_output(self, x: Tensor, output: Tensor) -> Tensor:
        rows, flat = x.flatten(0, -2), output.flatten(0, -2)
        self.punica_wrapper.add_lora_linear(
            flat,
            rows,
            self.lora_a_stacked[:1],
            self.lora_b_stacked[:1],
            1.0,
            self.output_slices[:1],
        )
        self.new_strips = rows.to(self.value_a.dtype) @ self.value_a.T
        return output


def attention_below(projection_name: str) -> Any:
    """The attention layer that reads a projection: the only one with the same parent module. Raises ModelError."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.attention import Attention

    parent = projection_name.rpartition(".")[0]
    layers = get_current_vllm_config().compilation_config.static_forward_context
    found = [
        layer
        for name, layer in layers.items()
        if name.startswith(f"{parent}.") and isinstance(layer, Attention)
    ]
    if len(found) != 1:
        raise ModelError(
            f"{projection_name}: got {len(found)} attention layers below {parent}, allowed is exactly one"
        )
    return found[0]
