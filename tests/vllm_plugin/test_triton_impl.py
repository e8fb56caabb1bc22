"""The CUDA backend inside vLLM's classes, without a GPU: what they store, move and attend to."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from precache.errors import UnsupportedModelError
from precache.vllm_plugin.strips import StripMoves, StripStep, strip_view
from tests.vllm_plugin.engines import VLLM
from tests.vllm_plugin.test_triton import (
    BLOCK,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    RANK,
    REQUESTS,
    SLOTS,
    WIDTH,
    Step,
)

pytestmark = VLLM


def test_the_implementation_stores_strips_moves_them_and_attends() -> None:
    from precache.vllm_plugin.backends.triton import SharingTritonBackend, StripTritonImpl

    step = Step()
    layer = StripTritonImpl(HEADS, HEAD_DIM, 0.25, KV_HEADS, None, None, "auto")
    new = torch.cat(
        [
            z[length - queries :]
            for (queries, length, _), (_, _, z) in zip(REQUESTS, step.tokens, strict=True)
        ]
    )
    layer.use_strips_of(
        SimpleNamespace(
            num_slots=SLOTS,
            lora_rank=RANK,
            new_strips=new,
            row_slots=step.row_slots,
            value_b=step.value_b,
        )
    )
    strips = strip_view(step.kv_cache, WIDTH)
    strips[step.metadata.slot_mapping // BLOCK, step.metadata.slot_mapping % BLOCK] = torch.nan
    layer.store_strips(step.kv_cache, step.metadata.slot_mapping)
    output = torch.zeros(step.num_rows, HEADS, HEAD_DIM)
    layer.forward(None, step.query, None, None, step.kv_cache, step.metadata, output)
    torch.testing.assert_close(output, step.expected(), atol=1e-5, rtol=1e-5)
    assert SharingTritonBackend.get_name() == "TRITON_ATTN"

    first, second = step.metadata.slot_mapping[:2]
    layer.step = StripStep([StripMoves(1, first[None], second[None])])
    layer.store_strips(step.kv_cache, step.metadata.slot_mapping)
    moved = strips[second // BLOCK, second % BLOCK, : SLOTS * RANK]
    assert torch.equal(moved[RANK : 2 * RANK], new[0, RANK : 2 * RANK])
    assert torch.equal(moved[:RANK], new[1, :RANK])


def test_layers_that_cannot_read_strips_are_refused() -> None:
    from precache.vllm_plugin.backends.triton import StripTritonImpl

    with pytest.raises(UnsupportedModelError, match="sliding-window"):
        StripTritonImpl(HEADS, HEAD_DIM, 0.25, KV_HEADS, None, 128, "auto")
    with pytest.raises(UnsupportedModelError, match="ALiBi"):
        StripTritonImpl(HEADS, HEAD_DIM, 0.25, KV_HEADS, [0.5] * HEADS, None, "auto")
