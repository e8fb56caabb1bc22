"""Blocked online-softmax attention in torch: the CPU backend, portable to CUDA and MPS.

Keys are the outer loop, so that a key block is widened, or its low-rank keys expanded, once for all
queries. The low-rank values take the cheaper of two ways, both within one pass:

* "low_rank", for few rows (decoding): a second accumulator, rank wide, beside that of `v_base`;
  `b` is applied once at the end. It costs rank per row and key.
* "expanded", for many rows (prefill): z b is added to one block of values at a time. It costs
  rank * head_dim per key, which is less once there are more rows than head_dim. On a CPU torch's
  "fused" kernel can then do most of the work; see `online_softmax`.

This file plans: what forms a block, what is skipped, and which way is taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from precache.ops.contract import AttentionInputs, AttentionOutput
from precache.ops.decode import attend_one, is_decode_step
from precache.ops.fused import has_fused_kernel
from precache.ops.key_blocks import KeyBlocks, Workspace
from precache.ops.numerics import accumulator_dtype, product_dtype
from precache.ops.online_softmax import QueryBlock, Span


@dataclass(frozen=True, slots=True)
class Tuning:
    """How to cut and compute one call; any choice gives the same result, up to rounding."""

    method: Literal["low_rank", "expanded", "fused"]
    query_block: int
    key_block: int
    product_dtype: torch.dtype


def attend(inputs: AttentionInputs, tuning: Tuning | None = None) -> AttentionOutput:
    """Attention in one pass over the visible keys; the others are never touched."""
    if tuning is None and is_decode_step(inputs):
        return attend_one(inputs)
    return attend_in_blocks(inputs, tuning or tuning_for(inputs))


def attend_in_blocks(inputs: AttentionInputs, tuning: Tuning) -> AttentionOutput:
    """Attention of query blocks to key blocks."""
    spans = _spans(inputs, tuning.query_block)
    workspace = Workspace(inputs.q.device)
    dtype = tuning.product_dtype
    fused = tuning.method == "fused" and inputs.softcap is None  # the kernel has no softcap
    keys = KeyBlocks(inputs, dtype, tuning.method != "low_rank", workspace)
    blocks = [QueryBlock(inputs, span, dtype, fused, workspace) for span in spans]
    for start, end in pairwise(_cuts(spans, tuning)):
        key_block = keys.load(start, end)
        for block in blocks:
            block.attend(key_block)
    return _collect(inputs, blocks)


def tuning_for(inputs: AttentionInputs) -> Tuning:
    """The sizes that were fastest on a 2-core AVX2 machine."""
    num_heads, q_len, head_dim = inputs.q.shape
    dtype = product_dtype(inputs.q)
    rows = num_heads // inputs.k.shape[0] * q_len
    if rows <= head_dim:
        used_as_stored = dtype == inputs.q.dtype and inputs.k_lora is None
        key_block = inputs.k.shape[1] if used_as_stored else 1024
        return Tuning("low_rank", q_len, key_block, dtype)
    if not has_fused_kernel(dtype, inputs.q.device) or inputs.softcap is not None:
        return Tuning("expanded", 64, 512, dtype)
    return Tuning("fused", *_fused_blocks(inputs), dtype)


def _fused_blocks(inputs: AttentionInputs) -> tuple[int, int]:
    """Query and key block. Smaller ones leave less to the masked blocks, outside the kernel."""
    if isinstance(inputs.q_positions, Tensor):
        return 64, 512
    last_key_seen = inputs.q_positions + inputs.q.shape[1] - 1 - inputs.kv_start
    window_hides_keys = inputs.window is not None and inputs.window <= last_key_seen
    return (256, 512) if window_hides_keys else (1024, 1024)


def _spans(inputs: AttentionInputs, query_block: int) -> list[Span]:
    """Cut the queries into blocks."""
    q_len, kv_len, window = inputs.q.shape[1], inputs.k.shape[1], inputs.window
    relative = inputs.q_positions - inputs.kv_start
    # The one place that reads device memory: which keys to skip is decided on the host.
    listed = (
        relative.tolist() if isinstance(relative, Tensor) else range(relative, relative + q_len)
    )
    spans = []
    for start in range(0, q_len, query_block):
        rows = slice(start, min(start + query_block, q_len))
        first, last = listed[rows.start], listed[rows.stop - 1]
        positions = relative[rows] if isinstance(relative, Tensor) else first
        seen_end = min(max(last + 1, 0), kv_len)
        seen_start = 0 if window is None else min(max(first - window + 1, 0), seen_end)
        clear_start = 0 if window is None else last - window + 1
        spans.append(Span(rows, positions, seen_start, seen_end, clear_start, first + 1))
    return spans


def _cuts(spans: list[Span], tuning: Tuning) -> list[int]:
    """Ends of the key blocks, from the first key that any row sees to the last one."""
    start = min(span.seen_start for span in spans)
    end = max(max(span.seen_end for span in spans), start)
    cuts = {start, end}
    if tuning.method == "fused":
        # So that most key blocks are seen by all rows of a query block, or are its triangle.
        cuts.update(edge for span in spans for edge in span.edges() if start < edge < end)
    return sorted(cuts.union(*(range(a, b, tuning.key_block) for a, b in pairwise(sorted(cuts)))))


def _collect(inputs: AttentionInputs, blocks: list[QueryBlock]) -> AttentionOutput:
    num_heads, q_len, head_dim = inputs.q.shape
    # Heads next to head_dim in memory, so that the output projection reads it without a copy.
    out = inputs.q.new_empty(q_len, num_heads, head_dim)
    lse = inputs.q.new_empty(q_len, num_heads, dtype=accumulator_dtype(inputs.q))
    by_kv_head = (q_len, inputs.k.shape[0], -1)
    for block in blocks:
        block.finish(
            out.view(*by_kv_head, head_dim).transpose(0, 1), lse.view(by_kv_head).transpose(0, 1)
        )
    return AttentionOutput(out.transpose(0, 1), lse.transpose(0, 1))
