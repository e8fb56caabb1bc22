"""The CUDA backend, EXPERIMENTAL: written by reading vLLM, never run on a GPU. `settings` has the opt-in.

vLLM's Triton backend with another attention: keys and values are stored by vLLM, strips by `strips`, and one kernel
attends with both accumulators.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl

from precache.errors import UnsupportedModelError
from precache.vllm_plugin.activation import current_settings
from precache.vllm_plugin.backends.paged import attend_with_strips, slots_of_requests
from precache.vllm_plugin.strips import (
    StripStep,
    move_strips,
    strip_rows,
    strip_view,
    strip_width,
    write_strips,
)


class SharingTritonBackend(TritonAttentionBackend):
    """vLLM's Triton backend; engines without strips get vLLM's own implementation from it."""

    @staticmethod
    def get_impl_cls() -> type[TritonAttentionImpl]:
        settings = current_settings()
        has_strips = settings is not None and settings.policy.strips
        return StripTritonImpl if has_strips else TritonAttentionImpl


class StripTritonImpl(TritonAttentionImpl):
    """Attention of one layer over pages with strips."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.alibi_slopes is not None or self.sinks is not None:
            raise UnsupportedModelError("attention with ALiBi or sinks cannot read strips")
        if self.sliding_window != (-1, -1):
            raise UnsupportedModelError("sliding-window attention cannot read strips")
        self.projection: Any = None  # a StripProjection
        self.step = StripStep()

    def use_strips_of(self, projection: Any) -> None:
        """Attend with the values of this projection's adapters."""
        self.projection = projection
        self.width = strip_width(projection.num_slots, projection.lora_rank, self.head_size)

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        self.store_strips(kv_cache, slot_mapping)

    def store_strips(self, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """Store the strips of the step's rows, and apply its moves."""
        strips = strip_view(kv_cache, self.width)
        if self.step.where is None:
            self.step.where = strip_rows(slot_mapping, strips.shape[1])
        write_strips(strips, self.projection.new_strips, self.step.where)
        for moves in self.step.moves:
            move_strips(strips, moves, self.projection.lora_rank)

    def forward(
        self,
        layer: Any,
        query: Tensor,  # [num_rows, num_heads, head_dim]
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,  # [num_blocks, num_kv_heads, block_size, 2 * head_dim]
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if attn_metadata is None:  # vLLM measures its memory
            return output.fill_(0)
        assert output_scale is None, "quantised outputs are refused at start"
        slots = getattr(attn_metadata, "precache_slots", None)
        if slots is None:
            slots = slots_of_requests(self.projection.row_slots, attn_metadata.query_start_loc)
            attn_metadata.precache_slots = slots
        attend_with_strips(
            query.view(-1, self.num_heads, self.head_size),
            kv_cache,
            attn_metadata,
            output.view(-1, self.num_heads, self.head_size),
            request_slots=slots,
            value_b=self.projection.stacked_value_b.to(kv_cache.dtype),
            strip_width=self.width,
            scale=self.scale,
            softcap=self.logits_soft_cap or None,
        )
        return output
