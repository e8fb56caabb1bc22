"""The CPU backend: vLLM's own attention operator, called so that each reader sees its own values.

Requests without an adapter are attended to as they are. A decoding request is our own kernel's, which sums `P v_base`
and `P z` in one pass over vLLM's pages. Where it was not compiled the operator runs twice, the second time with the
strips as a value head, and B is applied to that result: the full-width value is never made either way.
For longer queries the pages in use are copied with `z B` added to their values, which costs less than a second pass.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm import envs
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from precache.ops import native
from precache.ops.paged import PagedInputs, PagedStrips, paged_lora_attention
from precache.vllm_plugin.activation import current_settings
from precache.vllm_plugin.backends.cpu_plan import Part, Plan, Scratch, make_plan
from precache.vllm_plugin.backends.layer import StripLayer
from precache.vllm_plugin.settings import parse_settings

_CPU = torch.device("cpu")
_ROW_MAJOR_ISAS = ("vec", "vec16")  # those that keep a block's values as [block_size, head_dim]


class SharingCPUBackend(CPUAttentionBackend):
    """vLLM's CPU backend; engines without strips get vLLM's own implementation from it."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        settings = current_settings()
        has_strips = settings is not None and settings.policy.strips
        return StripAttentionImpl if has_strips else CPUAttentionBackendImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return RowMajorMetadataBuilder


class RowMajorMetadataBuilder(CPUAttentionMetadataBuilder):
    """Keeps an engine with strips away from instruction sets that pack values in the cache (AMX)."""

    isa: str

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        settings = parse_settings(vllm_config.additional_config)
        if settings is not None and settings.policy.strips and self.isa not in _ROW_MAJOR_ISAS:
            self.isa = "vec"
            self._set_isa_to_layers(layer_names)


class _Pages(NamedTuple):
    """Views of one layer's cache; a head's keys of a block and its values follow one another."""

    kv_cache: Tensor  # as vLLM hands it over
    whole: Tensor  # [num_blocks, num_kv_heads, 2 * block_size, head_dim]
    # As the operator takes them, [num_blocks, num_kv_heads, block_size, head_dim]. Its keys lie column by column.
    keys: Tensor
    values: Tensor
    strips: Tensor  # [num_blocks, block_size, width]
    # As our kernel takes them, [num_blocks, block_size, num_kv_heads, head_dim] and, for the strips, slots and rank.
    kernel_keys: Tensor
    kernel_values: Tensor
    kernel_strips: Tensor


class StripAttentionImpl(StripLayer, CPUAttentionBackendImpl):
    """Attention of one layer over pages with strips."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pages: _Pages | None = None

    def strips_in(self, kv_cache: Tensor) -> Tensor:
        return self._pages_of(kv_cache).strips

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
        plan = None if attn_metadata is None else self._plan(attn_metadata, kv_cache)
        if plan is None or (plan.decode is None and not plan.expanded):
            stock: Tensor = super().forward(
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                output_scale,
                output_block_scale,
            )
            return stock
        pages = self._pages_of(kv_cache)
        out = output.view(-1, self.num_heads, self.head_size)
        if plan.base is not None:
            part = plan.base
            out[part.rows] = self._attend(layer, part, query[part.rows], pages.keys, pages.values)
        if plan.decode is not None:
            part = plan.decode
            out[part.rows] = self._decode(layer, part, query[part.rows], pages)
        for scratch in plan.expanded:
            rows = scratch.part.rows
            expanded = self._expand(scratch, pages).chunk(2, dim=2)
            out[rows] = self._attend(layer, scratch.part, query[rows], *expanded)
        return output

    def _plan(self, metadata: Any, kv_cache: Tensor) -> Plan:
        plan: Plan | None = getattr(metadata, "precache_plan", None)
        if plan is None:
            slots = self.projection.row_slots[metadata.query_start_loc[:-1].to(torch.int64)]
            plan = metadata.precache_plan = make_plan(
                metadata.query_start_loc,
                metadata.seq_lens,
                metadata.block_table,
                slots,
                block_size=kv_cache.shape[2],
                decode_apart=self._kernel_decodes(kv_cache.dtype) or self.width == self.head_size,
            )
        return plan

    def _pages_of(self, kv_cache: Tensor) -> _Pages:
        """The views of the layer's cache, which is the same tensor in every step."""
        if self._pages is None or self._pages.kv_cache is not kv_cache:
            num_blocks, num_kv_heads, block_size, _ = kv_cache.shape
            whole = kv_cache.view(num_blocks, num_kv_heads, 2 * block_size, self.head_size)
            strips = super().strips_in(kv_cache)
            keys, values = whole.chunk(2, dim=2)
            columns = keys.view(num_blocks, num_kv_heads, self.head_size, block_size)
            by_slot = (self.projection.num_slots, self.projection.lora_rank)
            self._pages = _Pages(
                kv_cache,
                whole,
                keys,
                values,
                strips,
                kernel_keys=columns.permute(0, 3, 1, 2),
                kernel_values=values.transpose(1, 2),
                kernel_strips=strips[..., : math.prod(by_slot)].view(
                    num_blocks, block_size, *by_slot
                ),
            )
        return self._pages

    def _decode(self, layer: Any, part: Part, query: Tensor, pages: _Pages) -> Tensor:
        """P v_base + (P z) B for one query a request: [num_rows, num_heads, head_dim]."""
        if self._kernel_decodes(query.dtype):
            return self._decode_in_one_pass(part, query, pages)
        return self._decode_in_two_passes(layer, part, query, pages)

    def _kernel_decodes(self, dtype: torch.dtype) -> bool:
        """Whether our own kernel was compiled and takes this layer."""
        group, rank = self.num_queries_per_kv, self.projection.lora_rank
        return native.obstacle(_CPU, dtype) is None and native.fits(group, self.head_size, rank)

    def _decode_in_one_pass(self, part: Part, query: Tensor, pages: _Pages) -> Tensor:
        """By the kernel with both accumulators."""
        inputs = PagedInputs(
            q=query,
            k=pages.kernel_keys,
            v_base=pages.kernel_values,
            block_table=part.block_table,
            query_start=part.query_start_loc,
            kv_lens=part.seq_lens,
            max_q_len=1,
            max_kv_len=part.block_table.shape[1] * pages.strips.shape[1],
            scale=self.scale,
            strips=PagedStrips(pages.kernel_strips, self.projection.value_b, part.slots),
            softcap=self.logits_soft_cap or None,
        )
        return paged_lora_attention(inputs, backend="native").out.transpose(0, 1)

    def _decode_in_two_passes(self, layer: Any, part: Part, query: Tensor, pages: _Pages) -> Tensor:
        """By vLLM's operator, which reads the strips as the values of one KV head in a second pass."""
        out = self._attend(layer, part, query, pages.keys, pages.values)
        by_head = (-1, self.num_kv_heads, self.num_queries_per_kv, self.head_size)
        queries = query.reshape(by_head).transpose(0, 1).contiguous()
        strips = pages.strips[:, None]
        attended = torch.stack(
            [
                self._attend(layer, part, queries[head], pages.keys[:, head : head + 1], strips)
                for head in range(self.num_kv_heads)
            ]
        )  # [num_kv_heads, num_rows, queries per head, width]
        rank, target = self.projection.lora_rank, out.view(by_head)
        for slot, requests in part.requests_of:
            z = attended[:, requests, :, slot * rank : (slot + 1) * rank]
            delta = z @ self.projection.value_b[slot][:, None]
            target[requests] += delta.transpose(0, 1)
        return out

    def _expand(self, scratch: Scratch, pages: _Pages) -> Tensor:
        """Copies of pages with z B added to their values: [num_pairs, num_kv_heads, 2 * block_size, head_dim]."""
        block_size, rank = pages.strips.shape[1], self.projection.lora_rank
        copies = pages.whole.index_select(0, scratch.blocks)
        values = copies[:, :, block_size:]
        for slot, pairs in scratch.pairs_of:
            z = pages.strips[scratch.blocks[pairs], :, slot * rank : (slot + 1) * rank]
            values[pairs] += z[:, None] @ self.projection.value_b[slot].to(z.dtype)
        return copies

    def _attend(
        self, layer: Any, part: Part, query: Tensor, key_cache: Tensor, value_cache: Tensor
    ) -> Tensor:
        """vLLM's operator over one part; the numbers of heads are those of the query and of the keys."""
        out = torch.empty_like(query)
        num_heads, num_kv_heads = query.shape[1], key_cache.shape[1]
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=key_cache,
            value_cache=value_cache,
            output=out,
            query_start_loc=part.query_start_loc,
            seq_lens=part.seq_lens,
            scale=self.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=self.sliding_window,
            block_table=part.block_table,
            softcap=self.logits_soft_cap,
            scheduler_metadata=self._schedule(layer, part, query, num_heads, num_kv_heads),
            s_aux=None,
        )
        return out

    def _schedule(
        self, layer: Any, part: Part, query: Tensor, num_heads: int, num_kv_heads: int
    ) -> Tensor:
        key = (num_heads, num_kv_heads)
        if key not in part.schedules:
            part.schedules[key] = ops.cpu_attn_get_scheduler_metadata(
                num_reqs=len(part.seq_lens),
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=self.head_size,
                seq_lens=part.seq_lens,
                dtype=query.dtype,
                query_start_loc=part.query_start_loc,
                causal=True,
                sliding_window_size=self.sliding_window,
                isa=layer.isa,
                enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
            )
        return part.schedules[key]
