"""The CPU backend's decode step over pages that vLLM's operator filled: by our kernel and by two passes."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from precache.ops import ValueStrip, native, reference
from precache.ops.contract import AttentionInputs
from precache.vllm_plugin.strips import strip_rows, strip_view, write_strips
from tests.vllm_plugin.engines import VLLM

pytestmark = VLLM

HEADS, KV_HEADS, HEAD_DIM, SLOTS, RANK, WIDTH = 6, 2, 64, 3, 4, 64
REQUESTS = ((70, 2), (5, 0), (200, 2), (33, 1))  # tokens and slot of each
NUM_BLOCKS = 18
CPU = torch.device("cpu")


class Step:
    """Decoding requests over one layer's cache, keys and values stored by vLLM."""

    def __init__(self, block_size: int, dtype: torch.dtype, unused: float = math.nan) -> None:
        from vllm import _custom_ops as ops
        from vllm.config import VllmConfig, set_current_vllm_config

        from precache.vllm_plugin.backends.cpu import StripAttentionImpl
        from precache.vllm_plugin.backends.cpu_plan import make_plan

        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        page = KV_HEADS * block_size * 2 * HEAD_DIM + block_size * WIDTH
        shape = (NUM_BLOCKS, KV_HEADS, block_size, 2 * HEAD_DIM)
        strides = (page, block_size * 2 * HEAD_DIM, 2 * HEAD_DIM, 1)
        memory = torch.full((NUM_BLOCKS, page), unused, dtype=dtype)
        kv_cache = memory.as_strided(shape, strides)
        config = VllmConfig()
        config.model_config = SimpleNamespace(dtype=dtype)
        with set_current_vllm_config(config):
            self.layer = StripAttentionImpl(HEADS, HEAD_DIM, 0.125, KV_HEADS, None, None, "auto")
        value_b = random(SLOTS, KV_HEADS, RANK, HEAD_DIM) / math.sqrt(RANK)
        self.layer.use_strips_of(SimpleNamespace(num_slots=SLOTS, lora_rank=RANK, value_b=value_b))
        self.pages = self.layer._pages_of(kv_cache)
        self.query = random(len(REQUESTS), HEADS, HEAD_DIM) * 2
        self.expected = torch.empty(len(REQUESTS), HEADS, HEAD_DIM)
        table = torch.zeros(len(REQUESTS), -(-200 // block_size), dtype=torch.int32)
        blocks = torch.randperm(NUM_BLOCKS, generator=generator).tolist()
        for request, (length, slot) in enumerate(REQUESTS):
            own = [blocks.pop() for _ in range(-(-length // block_size))]
            table[request, : len(own)] = torch.tensor(own)
            where = torch.tensor(
                [own[t // block_size] * block_size + t % block_size for t in range(length)]
            )
            k, v = random(length, KV_HEADS, HEAD_DIM), random(length, KV_HEADS, HEAD_DIM)
            z = random(length, SLOTS * RANK)
            ops.cpu_attn_reshape_and_cache(k, v, self.pages.keys, self.pages.values, where, "vec")
            strips = strip_view(kv_cache, WIDTH)
            strips[where // block_size, where % block_size] = 0  # as vLLM's cache starts
            write_strips(strips, z, strip_rows(where, block_size))
            strip = ValueStrip(z[:, slot * RANK : (slot + 1) * RANK].float(), value_b[slot].float())
            call = AttentionInputs(
                q=self.query[request].float().unsqueeze(1),
                k=k.float().transpose(0, 1),
                v_base=v.float().transpose(0, 1),
                scale=0.125,
                q_positions=length - 1,
                kv_start=0,
                v_lora=strip,
                k_lora=None,
                window=None,
                softcap=None,
            )
            self.expected[request] = reference.attend(call).out[:, 0]
        count = len(REQUESTS)
        self.part: Any = make_plan(
            torch.arange(count + 1, dtype=torch.int32),
            torch.tensor([length for length, _ in REQUESTS], dtype=torch.int32),
            table,
            torch.tensor([slot for _, slot in REQUESTS]),
            block_size,
            decode_apart=True,
        ).decode


def isa() -> Any:
    return SimpleNamespace(isa="vec")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_the_kernel_reads_vllms_pages(block_size: int, dtype: torch.dtype) -> None:
    if reason := native.obstacle(CPU, dtype):
        pytest.skip(reason)
    step = Step(block_size, dtype)
    got = step.layer._decode_in_one_pass(step.part, step.query, step.pages)
    bound = 1e-5 if dtype == torch.float32 else 0.01
    assert (got.float() - step.expected).abs().max() < bound
    others = step.part.slots.roll(1)
    step.part.slots = others
    wrong = step.layer._decode_in_one_pass(step.part, step.query, step.pages)
    assert (wrong.float() - step.expected).abs().amax((1, 2))[
        others != others.roll(-1)
    ].min() > 0.05


def test_two_passes_of_the_operator_give_the_same() -> None:
    # The operator multiplies what lies past a sequence's end by 0.
    step = Step(32, torch.float32, unused=1e3)
    got = step.layer._decode_in_two_passes(isa(), step.part, step.query, step.pages)
    assert (got - step.expected).abs().max() < 1e-5


def test_the_kernel_is_taken_where_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(32, torch.float32)
    taken = []
    for name in ("_decode_in_one_pass", "_decode_in_two_passes"):
        monkeypatch.setattr(step.layer, name, lambda *_, name=name: taken.append(name))
    for obstacle in (None, "it was not compiled"):
        monkeypatch.setattr(native, "obstacle", lambda *_, found=obstacle: found)
        step.layer._decode(isa(), step.part, step.query, step.pages)
    assert taken == ["_decode_in_one_pass", "_decode_in_two_passes"]
