"""Every refusal of the attention contract, one by one: it names what, what it got, what is allowed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from precache.errors import PrecacheError
from precache.ops import (
    AttentionContractError,
    AttentionOutput,
    KeyStrip,
    UnknownBackendError,
    ValueStrip,
    available_backends,
    lora_attention,
    merge_attention,
)
from tests.ops.cases import Case

HEADS, KV_HEADS, Q_LEN, KV_LEN, HEAD_DIM, RANK = 6, 2, 3, 10, 8, 4


def valid_call() -> dict[str, Any]:
    return {
        "q": torch.ones(HEADS, Q_LEN, HEAD_DIM),
        "k": torch.ones(KV_HEADS, KV_LEN, HEAD_DIM),
        "v_base": torch.ones(KV_HEADS, KV_LEN, HEAD_DIM),
        "scale": 0.5,
        "q_positions": 7,
        "v_lora": ValueStrip(torch.ones(KV_LEN, RANK), torch.ones(KV_HEADS, RANK, HEAD_DIM)),
        "k_lora": key_strip(),
    }


def key_strip(**changes: torch.Tensor) -> KeyStrip:
    fields = {
        "z": torch.ones(KV_LEN, RANK),
        "b": torch.ones(KV_HEADS, RANK, HEAD_DIM),
        "cos": torch.ones(KV_LEN, HEAD_DIM),
        "sin": torch.zeros(KV_LEN, HEAD_DIM),
    }
    return KeyStrip(**(fields | changes))


def value_strip(z_shape: tuple[int, ...], b_shape: tuple[int, ...]) -> ValueStrip:
    return ValueStrip(torch.ones(z_shape), torch.ones(b_shape))


BROKEN: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "q without heads": (
        {"q": torch.ones(Q_LEN, HEAD_DIM)},
        "q.shape",
        "[3, 8]",
        "[num_heads, q_len, head_dim]",
    ),
    "no query": ({"q": torch.ones(HEADS, 0, HEAD_DIM)}, "q.shape", "[6, 0, 8]", "none of them 0"),
    "no key": (
        {"k": torch.ones(KV_HEADS, 0, HEAD_DIM)},
        "k.shape",
        "[2, 0, 8]",
        "none of them 0",
    ),
    "k of another head_dim": (
        {"k": torch.ones(KV_HEADS, KV_LEN, 4)},
        "k.shape",
        "[2, 10, 4]",
        "[num_kv_heads, kv_len, 8]",
    ),
    "v_base shorter than k": (
        {"v_base": torch.ones(KV_HEADS, 9, HEAD_DIM)},
        "v_base.shape",
        "[2, 9, 8]",
        "[2, 10, 8]",
    ),
    "heads that do not divide": (
        {"q": torch.ones(5, Q_LEN, HEAD_DIM)},
        "num_heads",
        "5",
        "a multiple of num_kv_heads=2",
    ),
    "integer q": (
        {"q": torch.ones(HEADS, Q_LEN, HEAD_DIM, dtype=torch.int32)},
        "q.dtype",
        "torch.int32",
        "a floating point dtype",
    ),
    "k of another dtype": (
        {"k": torch.ones(KV_HEADS, KV_LEN, HEAD_DIM, dtype=torch.bfloat16)},
        "k.dtype",
        "torch.bfloat16",
        "torch.float32",
    ),
    "v_base on another device": (
        {"v_base": torch.ones(KV_HEADS, KV_LEN, HEAD_DIM, device="meta")},
        "v_base.device",
        "meta",
        "cpu",
    ),
    "q transposed in memory": (
        {"q": torch.ones(HEADS, HEAD_DIM, Q_LEN).transpose(1, 2)},
        "q.stride(-1)",
        "3",
        "1",
    ),
    "k transposed in memory": (
        {"k": torch.ones(KV_HEADS, HEAD_DIM, KV_LEN).transpose(1, 2)},
        "k.stride(-1)",
        "10",
        "1",
    ),
    "negative kv_start": ({"kv_start": -1}, "kv_start", "-1", "0 or more"),
    "negative position": ({"q_positions": -1}, "q_positions", "-1", "0 or more"),
    "too few positions": (
        {"q_positions": torch.arange(2)},
        "q_positions",
        "torch.int64 [2]",
        "torch.int64 [3]",
    ),
    "int32 positions": (
        {"q_positions": torch.arange(3, dtype=torch.int32)},
        "q_positions",
        "torch.int32 [3]",
        "torch.int64 [3]",
    ),
    "descending positions": (
        {"q_positions": torch.tensor([3, 5, 4])},
        "q_positions",
        "out of order",
        "ascending",
    ),
    "positions on a third device": (
        {"q_positions": torch.arange(3, device="meta")},
        "q_positions.device",
        "meta",
        "cpu",
    ),
    "value strip of another length": (
        {"v_lora": value_strip((9, RANK), (KV_HEADS, RANK, HEAD_DIM))},
        "v_lora.z.shape",
        "[9, 4]",
        "[10, rank]",
    ),
    "value strip of rank 0": (
        {"v_lora": value_strip((KV_LEN, 0), (KV_HEADS, 0, HEAD_DIM))},
        "v_lora.z.shape",
        "[10, 0]",
        "1 or more",
    ),
    "value strip of two ranks": (
        {"v_lora": value_strip((KV_LEN, RANK), (KV_HEADS, 5, HEAD_DIM))},
        "v_lora.b.shape",
        "[2, 5, 8]",
        "[2, 4, 8]",
    ),
    "value strip without heads": (
        {"v_lora": value_strip((KV_LEN, RANK), (RANK, HEAD_DIM))},
        "v_lora.b.shape",
        "[4, 8]",
        "[2, 4, 8]",
    ),
    "value strip of another dtype": (
        {
            "v_lora": ValueStrip(
                torch.ones(KV_LEN, RANK).double(), torch.ones(KV_HEADS, RANK, HEAD_DIM)
            )
        },
        "v_lora.z.dtype",
        "torch.float64",
        "torch.float32",
    ),
    "value strip transposed in memory": (
        {"v_lora": ValueStrip(torch.ones(RANK, KV_LEN).t(), torch.ones(KV_HEADS, RANK, HEAD_DIM))},
        "v_lora.z.stride(-1)",
        "10",
        "1",
    ),
    "key strip of two ranks": (
        {"k_lora": key_strip(b=torch.ones(KV_HEADS, 5, HEAD_DIM))},
        "k_lora.b.shape",
        "[2, 5, 8]",
        "[2, 4, 8]",
    ),
    "rotary table too short": (
        {"k_lora": key_strip(cos=torch.ones(9, HEAD_DIM))},
        "k_lora.cos.shape",
        "[9, 8]",
        "[10, 8]",
    ),
    "rotary table of half the width": (
        {"k_lora": key_strip(sin=torch.ones(KV_LEN, 4))},
        "k_lora.sin.shape",
        "[10, 4]",
        "[10, 8]",
    ),
    "rotary table of another dtype": (
        {"k_lora": key_strip(sin=torch.ones(KV_LEN, HEAD_DIM).double())},
        "k_lora.sin.dtype",
        "torch.float64",
        "torch.float32",
    ),
    "scale 0": ({"scale": 0.0}, "scale", "0.0", "above 0"),
    "window 0": ({"window": 0}, "window", "0", "1 or more"),
    "softcap 0": ({"softcap": 0.0}, "softcap", "0.0", "above 0"),
}


@pytest.mark.parametrize(("changes", "what", "got", "allowed"), BROKEN.values(), ids=BROKEN)
def test_broken_call_is_refused(changes: dict[str, Any], what: str, got: str, allowed: str) -> None:
    with pytest.raises(AttentionContractError) as refusal:
        lora_attention(**(valid_call() | changes))
    assert refusal.value.what == what
    assert got in str(refusal.value.got)
    assert allowed in refusal.value.allowed
    assert str(refusal.value).startswith(f"{what}: got {refusal.value.got}, allowed is ")
    assert isinstance(refusal.value, PrecacheError)


def test_the_call_that_the_broken_ones_change_is_accepted() -> None:
    assert lora_attention(**valid_call()).out.shape == (HEADS, Q_LEN, HEAD_DIM)


def test_odd_head_dim_is_refused_with_a_key_strip_only() -> None:
    odd = Case(head_dim=15).inputs()
    tables_of_odd_width = KeyStrip(
        torch.ones(40, 4), torch.ones(2, 4, 15), torch.ones(40, 15), torch.ones(40, 15)
    )
    with pytest.raises(AttentionContractError, match="head_dim: got 15, allowed is an even number"):
        lora_attention(**odd._replace(k_lora=tables_of_odd_width)._asdict())
    assert lora_attention(**odd._asdict()).out.isfinite().all()


def test_call_that_needs_a_gradient_is_refused() -> None:
    call = valid_call() | {"q": torch.ones(HEADS, Q_LEN, HEAD_DIM, requires_grad=True)}
    with pytest.raises(AttentionContractError, match=r"autograd: .* allowed is inference"):
        lora_attention(**call)
    with torch.inference_mode():
        assert lora_attention(**call).out.isfinite().all()


def test_unknown_backend_names_the_known_ones() -> None:
    with pytest.raises(UnknownBackendError, match="got 'cuda'") as refusal:
        lora_attention(**valid_call(), backend="cuda")
    assert refusal.value.known == ["auto", *available_backends()]
    assert set(available_backends()) >= {"cpu", "reference"}


def test_merging_nothing_is_refused() -> None:
    with pytest.raises(AttentionContractError, match="parts: got an empty sequence"):
        merge_attention([])


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (AttentionOutput(torch.ones(2, 4, 8), torch.ones(2, 4)), "parts[1]"),
        (AttentionOutput(torch.ones(2, 3, 8), torch.ones(3, 2)), "parts[1]"),
        (AttentionOutput(torch.ones(2, 3, 8).double(), torch.ones(2, 3)), "parts[1].out.dtype"),
    ],
    ids=["other queries", "lse transposed", "other dtype"],
)
def test_merging_parts_that_do_not_fit_is_refused(other: AttentionOutput, what: str) -> None:
    first = AttentionOutput(torch.ones(2, 3, 8), torch.ones(2, 3))
    with pytest.raises(AttentionContractError) as refusal:
        merge_attention([first, other])
    assert refusal.value.what == what
