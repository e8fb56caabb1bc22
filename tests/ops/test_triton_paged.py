"""A batch of sequences over a paged cache, in Triton's interpreter, against the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from precache.ops import AttentionContractError, AttentionOutput
from precache.ops.paged import PagedInputs, PagedStrips, check_paged, paged_lora_attention
from tests.ops.paged_cases import BASE, Batch, paged_reference
from tests.ops.test_attention import assert_different, assert_same

pytest.importorskip("triton", reason="triton is not installed")

from precache.ops.triton import Tiles, attend_paged


def attend(inputs: PagedInputs, splits: int = 1) -> AttentionOutput:
    check_paged(inputs)
    return attend_paged(inputs, torch.empty_like(inputs.q), Tiles(16, 16, 4, 2, splits))


BATCHES = {
    "mixed": Batch(),
    "decoding": Batch(((1, 30, 2), (1, 17, 0), (1, 5, BASE), (1, 24, 2))),
    "base only": Batch(rank=None),
    "everyone on the base": Batch(((3, 20, BASE), (1, 9, BASE))),
    "window and softcap": Batch(window=11, softcap=3.0),
    "one row a page": Batch(((4, 7, 1), (1, 3, 0)), page_size=1),
    "pages wider than a block of keys": Batch(((3, 40, 1), (1, 33, 0)), page_size=32),
    "one KV head": Batch(((4, 20, 1), (1, 9, 0)), num_kv_heads=1, group=4, rank=16),
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_every_kind_of_batch_matches_reference(batch: Batch) -> None:
    inputs = batch.inputs()
    assert_same(attend(inputs), paged_reference(inputs))


@pytest.mark.parametrize("name", ["mixed", "decoding", "window and softcap"])
def test_split_keys_match_reference(name: str) -> None:
    inputs = BATCHES[name].inputs()
    assert_same(attend(inputs, splits=2), paged_reference(inputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close_to_float32(dtype: torch.dtype) -> None:
    inputs = Batch(((3, 30, 1), (1, 20, BASE)), dtype=dtype).inputs()
    got, exact = attend(inputs, 2), paged_reference(inputs)
    rounded = (exact.out.to(dtype).float() - exact.out).abs().max()
    assert (got.out.float() - exact.out).abs().max() <= 4 * rounded
    torch.testing.assert_close(got.lse, exact.lse, atol=1e-4, rtol=1e-4)


def test_every_sequence_reads_its_own_adapter() -> None:
    inputs = Batch().inputs()
    strips = inputs.strips
    assert strips is not None
    got = attend(inputs)
    turned = strips.adapter_index.flip(0)
    wrong = attend(inputs._replace(strips=PagedStrips(strips.z, strips.b, turned)))
    same = (strips.adapter_index == turned).tolist()
    for seq, (start, end) in enumerate(zip(*_bounds(inputs), strict=True)):
        difference = (got.out[:, start:end] - wrong.out[:, start:end]).abs().max()
        assert (difference == 0) if same[seq] else (difference > 0.01)


def test_order_of_the_pages_matters() -> None:
    inputs = Batch(((1, 32, 0),)).inputs()
    flipped = inputs._replace(block_table=inputs.block_table.flip(1))
    late = inputs._replace(kv_lens=inputs.kv_lens - 1)
    window = {"window": 9}
    got = attend(inputs._replace(**window))
    assert_different(got, attend(flipped._replace(**window)))
    assert_different(got, attend(late._replace(**window)))


def test_the_given_output_is_filled() -> None:
    inputs = Batch(((2, 9, 0), (1, 4, 1))).inputs()
    buffer = torch.zeros(3, 12, 16)
    got = paged_lora_attention(inputs, buffer[:, 3:9])
    expected = paged_reference(inputs)
    assert_same(got, expected)
    torch.testing.assert_close(buffer[:, 3:9].transpose(0, 1), expected.out, atol=1e-5, rtol=1e-5)
    assert (buffer[:, :3] == 0).all()
    assert (buffer[:, 9:] == 0).all()


def _bounds(inputs: PagedInputs) -> tuple[list[int], list[int]]:
    starts = inputs.query_start.tolist()
    return starts[:-1], starts[1:]


# -- refusals --------------------------------------------------------------------------------------

VALID = Batch().inputs()
STRIPS = VALID.strips
assert STRIPS is not None

BROKEN: dict[str, tuple[dict[str, Any], str, str]] = {
    "q of four dimensions": ({"q": VALID.q[None]}, "q", "[num_tokens, num_heads, head_dim]"),
    "k without pages": ({"k": VALID.k[0]}, "k.shape", "[num_pages, page_size, num_kv_heads, 16]"),
    "heads that do not divide": ({"q": VALID.q[:, :5]}, "num_heads", "a multiple of"),
    "v_base of other pages": ({"v_base": VALID.v_base[1:]}, "v_base.shape", "[21, 8, 2, 16]"),
    "k of another dtype": ({"k": VALID.k.half()}, "k.dtype", "torch.float32"),
    "q transposed in memory": (
        {"q": VALID.q.transpose(1, 2).contiguous().transpose(1, 2)},
        "q.stride(-1)",
        "1",
    ),
    "k transposed in memory": (
        {"k": VALID.k.transpose(2, 3).contiguous().transpose(2, 3)},
        "k.stride(-1)",
        "1",
    ),
    "k elsewhere": ({"k": VALID.k.to("meta")}, "k.device", "cpu"),
    "int64 table": ({"block_table": VALID.block_table.long()}, "block_table", "torch.int32"),
    "a table row too few": ({"block_table": VALID.block_table[1:]}, "block_table", "[5, 7]"),
    "a start too few": ({"query_start": VALID.query_start[1:]}, "query_start", "[6]"),
    "no query": ({"max_q_len": 0}, "max_q_len", "1 or more"),
    "z of other pages": (
        {"strips": PagedStrips(STRIPS.z[1:], STRIPS.b, STRIPS.adapter_index)},
        "strips.z.shape",
        "8, 3, 4",
    ),
    "flat z": (
        {"strips": PagedStrips(STRIPS.z.flatten(2), STRIPS.b, STRIPS.adapter_index)},
        "strips.z.shape",
        "num_adapters, rank",
    ),
    "b of an adapter too few": (
        {"strips": PagedStrips(STRIPS.z, STRIPS.b[1:], STRIPS.adapter_index)},
        "strips.b.shape",
        "[3, 2, 4, 16]",
    ),
    "adapters by token": (
        {"strips": PagedStrips(STRIPS.z, STRIPS.b, STRIPS.adapter_index.repeat(2))},
        "strips.adapter_index",
        "[5]",
    ),
    "window 0": ({"window": 0}, "window", "1 or more"),
}


@pytest.mark.parametrize(("changes", "what", "allowed"), BROKEN.values(), ids=BROKEN)
def test_broken_batch_is_refused(changes: dict[str, Any], what: str, allowed: str) -> None:
    with pytest.raises(AttentionContractError) as refusal:
        paged_lora_attention(VALID._replace(**changes))
    assert refusal.value.what == what
    assert allowed in refusal.value.allowed


def test_broken_output_is_refused() -> None:
    with pytest.raises(AttentionContractError, match="out.shape"):
        paged_lora_attention(VALID, torch.empty(19, 6, 8))
