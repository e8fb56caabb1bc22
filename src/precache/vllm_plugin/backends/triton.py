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
from precache.vllm_plugin.backends.layer import StripLayer
from precache.vllm_plugin.backends.paged import attend_with_strips, slots_of_requests


class SharingTritonBackend(TritonAttentionBackend):
    """vLLM's Triton backend; engines without strips get vLLM's own implementation from it."""

    @staticmethod
    def get_impl_cls() -> type[TritonAttentionImpl]:
        settings = current_settings()
        has_strips = settings is not None and settings.policy.strips
        return StripTritonImpl if has_strips else TritonAttentionImpl


class StripTritonImpl(StripLayer, TritonAttentionImpl):
    """Attention of one layer over pages with strips."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.sliding_window != (-1, -1):
            raise UnsupportedModelError("sliding-window attention cannot read strips")

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        self.store_strips(kv_cache, slot_mapping)

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
            value_b=self.projection.value_b.to(kv_cache.dtype),
            strip_width=self.width,
            scale=self.scale,
            softcap=self.logits_soft_cap or None,
        )
        return output
