"""Attention over vLLM's paged cache with strips, in one Triton kernel. Knows vLLM's layout; imports no vLLM."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from precache.ops.paged import PagedInputs, PagedStrips, paged_lora_attention
from precache.vllm_plugin.strips import strip_view


def attend_with_strips(
    query: Tensor,  # [num_rows or more, num_heads, head_dim]
    kv_cache: Tensor,  # [num_blocks, num_kv_heads, block_size, 2 * head_dim], blocks outermost
    metadata: Any,  # as vLLM's TritonAttentionMetadata
    output: Tensor,  # as query; the rows of the batch are filled
    *,
    request_slots: Tensor,  # int32 [num_requests], -1 without an adapter
    value_b: Tensor,  # [num_slots, num_kv_heads, rank, head_dim], scaled
    strip_width: int,  # columns of a strip row
    scale: float,
    softcap: float | None,
) -> None:
    """Attend with `V_j = v_base + z_j B_j` for requests of slot j, and with `v_base` for those without an adapter.

    Nothing is read back from the device. Raises BackendUnavailableError where Triton cannot run.
    """
    rows = metadata.num_actual_tokens
    num_slots, _, rank, head_dim = value_b.shape
    pages = kv_cache.transpose(1, 2)
    tail = strip_view(kv_cache, strip_width)[..., : num_slots * rank]
    strips = tail.view(*tail.shape[:2], num_slots, rank)
    inputs = PagedInputs(
        q=query[:rows],
        k=pages[..., :head_dim],
        v_base=pages[..., head_dim:],
        block_table=metadata.block_table,
        query_start=metadata.query_start_loc,
        kv_lens=metadata.seq_lens,
        max_q_len=metadata.max_query_len,
        max_kv_len=metadata.max_seq_len,
        scale=scale,
        strips=PagedStrips(strips, value_b, request_slots),
        softcap=softcap,
    )
    paged_lora_attention(inputs, output[:rows])


def slots_of_requests(row_slots: Tensor, query_start_loc: Tensor) -> Tensor:
    """The slot of each request, int32: that of its first row. `row_slots` is [num_rows or more]."""
    return row_slots[query_start_loc[:-1].long()].to(torch.int32)
