"""The CUDA backend's forward, in Triton's interpreter: a hand-made paged cache with strips, and vLLM's metadata."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from precache.ops import ValueStrip, reference
from precache.ops.contract import AttentionInputs
from precache.vllm_plugin.strips import strip_rows, strip_view, write_strips

pytest.importorskip("triton", reason="triton is not installed")

from precache.vllm_plugin.backends.paged import attend_with_strips, slots_of_requests

HEADS, KV_HEADS, HEAD_DIM, SLOTS, RANK, BLOCK, WIDTH = 4, 2, 16, 3, 4, 16, 16
# (queries, tokens, slot) of each request: decoding, a prefill, an extension without an adapter.
REQUESTS = ((1, 37, 2), (9, 9, 0), (3, 20, -1), (1, 18, 0))
NUM_BLOCKS = 9


class Step:
    """One step of an engine: a layer's cache, what is known of it, and the metadata that vLLM makes."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        page = KV_HEADS * BLOCK * 2 * HEAD_DIM + BLOCK * WIDTH
        memory = torch.full((NUM_BLOCKS, page), torch.nan)
        shape = (NUM_BLOCKS, KV_HEADS, BLOCK, 2 * HEAD_DIM)
        strides = (page, BLOCK * 2 * HEAD_DIM, 2 * HEAD_DIM, 1)
        self.kv_cache = memory.as_strided(shape, strides)
        self.block_table = torch.full((len(REQUESTS), 3), NUM_BLOCKS - 1, dtype=torch.int32)
        blocks = torch.randperm(NUM_BLOCKS - 1, generator=generator).tolist()
        self.tokens: list[tuple[Tensor, Tensor, Tensor]] = []  # k, v and z of each request
        self.slot_mapping: list[int] = []
        for index, (queries, length, _) in enumerate(REQUESTS):
            count = -(-length // BLOCK)
            own = [blocks.pop() for _ in range(count)]
            self.block_table[index, :count] = torch.tensor(own)
            k, v = random(KV_HEADS, length, HEAD_DIM), random(KV_HEADS, length, HEAD_DIM)
            z = random(length, SLOTS * RANK)
            slots = torch.tensor([own[t // BLOCK] * BLOCK + t % BLOCK for t in range(length)])
            self.kv_cache[slots // BLOCK, :, slots % BLOCK] = torch.cat([k, v], -1).transpose(0, 1)
            write_strips(strip_view(self.kv_cache, WIDTH), z, strip_rows(slots, BLOCK))
            self.tokens.append((k, v, z))
            self.slot_mapping += slots[length - queries :].tolist()
        starts = torch.tensor([0, *(queries for queries, _, _ in REQUESTS)]).cumsum(0)
        self.num_rows = int(starts[-1])
        self.query = random(self.num_rows, HEADS, HEAD_DIM) * 2
        self.value_b = random(SLOTS, KV_HEADS, RANK, HEAD_DIM) / math.sqrt(RANK)
        self.row_slots = torch.tensor(
            [slot for queries, _, slot in REQUESTS for _ in range(queries)]
        )
        self.metadata = SimpleNamespace(
            num_actual_tokens=self.num_rows,
            max_query_len=max(queries for queries, _, _ in REQUESTS),
            query_start_loc=starts.to(torch.int32),
            max_seq_len=max(length for _, length, _ in REQUESTS),
            seq_lens=torch.tensor([length for _, length, _ in REQUESTS], dtype=torch.int32),
            block_table=self.block_table,
            slot_mapping=torch.tensor(self.slot_mapping),
        )

    def expected(self) -> Tensor:
        """Every request by the definition, [num_rows, num_heads, head_dim]."""
        outs, start = [], 0
        for (queries, length, slot), (k, v, z) in zip(REQUESTS, self.tokens, strict=True):
            columns = slice(slot * RANK, (slot + 1) * RANK)
            strip = None if slot < 0 else ValueStrip(z[:, columns], self.value_b[slot])
            q = self.query[start : start + queries].transpose(0, 1)
            position = length - queries
            call = AttentionInputs(q, k, v, 0.25, position, 0, strip, None, None, None)
            outs.append(reference.attend(call).out.transpose(0, 1))
            start += queries
        return torch.cat(outs)


def attend(step: Step, **changes: Any) -> Tensor:
    """The forward; rows past the batch, which vLLM pads with, stay as they are."""
    output = torch.full((step.num_rows + 2, HEADS, HEAD_DIM), 7.0)
    padded_query = torch.cat([step.query, torch.full((2, HEADS, HEAD_DIM), torch.nan)])
    arguments: dict[str, Any] = {
        "request_slots": slots_of_requests(step.row_slots, step.metadata.query_start_loc),
        "value_b": step.value_b,
        "strip_width": WIDTH,
        "scale": 0.25,
        "softcap": None,
    } | changes
    attend_with_strips(padded_query, step.kv_cache, step.metadata, output, **arguments)
    assert (output[step.num_rows :] == 7).all()
    return output[: step.num_rows]


def test_each_request_reads_its_own_strip_and_the_base_reads_none() -> None:
    step = Step()
    got, expected = attend(step), step.expected()
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    others = torch.tensor([0, 2, 1, -1], dtype=torch.int32)
    wrong = attend(step, request_slots=others)
    assert ((got - wrong).abs().amax((1, 2)) > 0.01).all()


def test_slots_are_those_of_the_first_rows() -> None:
    step = Step()
    slots = slots_of_requests(step.row_slots, step.metadata.query_start_loc)
    assert slots.tolist() == [slot for _, _, slot in REQUESTS]
    assert slots.dtype == torch.int32
