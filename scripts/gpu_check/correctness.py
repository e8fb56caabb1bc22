"""The kernels against the definition: at most twice the error of plain torch in the same dtype, as in the tests."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from precache.ops import AttentionOutput, KeyStrip, ValueStrip, reference
from precache.ops.contract import AttentionInputs
from precache.ops.paged import PagedInputs, PagedStrips, paged_lora_attention
from precache.ops.triton import attend
from tests.ops.cases import Case, in_float32
from tests.ops.paged_cases import BASE, Batch, paged_reference, sequence

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ROOM = {torch.float32: 1e-4, torch.bfloat16: 1e-3, torch.float16: 1e-4}

LARGE = Case(num_kv_heads=2, group=4, head_dim=128, rank=8)
CASES = {
    "decode": replace(LARGE, kv_len=5000),
    "decode, base": replace(LARGE, kv_len=5000, rank=None),
    "decode, d64, group 3, rank 64": replace(LARGE, kv_len=5000, group=3, head_dim=64, rank=64),
    "extend": replace(LARGE, q_len=37, kv_len=3001),
    "prefill": replace(LARGE, q_len=700, kv_len=1500),
    "window, softcap": replace(LARGE, q_len=700, kv_len=1500, window=300, softcap=30.0),
    "key strip": replace(LARGE, q_len=130, kv_len=1000, key_rank=8),
    "scattered": replace(LARGE, q_len=3, kv_len=2000, q_positions=[5, 900, 1999]),
}
BATCH = Batch(
    ((300, 300, 1), (1, 2001, 0), (40, 900, BASE), (1, 1, 2), (1, 1500, 2)),
    page_size=16,
    group=4,
    head_dim=128,
    rank=8,
)
TINY_CASES = {
    "decode": Case(kv_len=20),
    "window, softcap, key strip": Case(q_len=3, kv_len=30, window=9, softcap=3.0, key_rank=2),
    "scattered": Case(q_len=2, kv_len=20, q_positions=[5, 19]),
}
TINY_BATCH = Batch(((2, 9, 1), (1, 5, BASE)))


def check(device: torch.device, *, tiny: bool) -> list[dict[str, Any]]:
    """One row per call and dtype; prints those that are wrong."""
    rows = []
    for dtype in DTYPES:
        for name, case in (TINY_CASES if tiny else CASES).items():
            inputs = _moved(replace(case, dtype=dtype).inputs(), device)
            exact = reference.attend(in_float32(inputs))
            rows.append(_row(name, dtype, attend(inputs), exact, _plain(inputs)))
        batch = replace(TINY_BATCH if tiny else BATCH, dtype=dtype).inputs()
        batch = _moved_batch(batch, device)
        plain = torch.cat(
            [_plain(sequence(batch, seq)) for seq in range(batch.kv_lens.shape[0])], dim=1
        )
        got = paged_lora_attention(batch)
        rows.append(_row("paged batch", dtype, got, paged_reference(batch), plain))
    for row in rows:
        print(
            f"{'ok   ' if row['right'] else 'WRONG'} {row['dtype']:<9} {row['call']:<32} "
            f"error {row['error']:.1e}, plain torch {row['plain_error']:.1e}"
        )
    return rows


def _row(
    name: str, dtype: torch.dtype, got: AttentionOutput, exact: AttentionOutput, plain: Tensor
) -> dict[str, Any]:
    ours, theirs = (_rms(out.float() - exact.out) for out in (got.out, plain))
    lse = float((got.lse - exact.lse).abs().nan_to_num().max())
    right = ours <= 2 * theirs + _ROOM[dtype] and lse <= 2e-3 and math.isfinite(ours)
    return {
        "call": name,
        "dtype": str(dtype).removeprefix("torch."),
        "error": ours,
        "plain_error": theirs,
        "lse_error": lse,
        "right": right,
    }


def _rms(difference: Tensor) -> float:
    return float(difference.square().mean().sqrt())


def _plain(inputs: AttentionInputs) -> Tensor:
    """As eager attention in transformers: keys and values materialised, products in q's dtype."""
    k, v, num_keys = inputs.k, inputs.v_base, inputs.k.shape[1]
    if inputs.v_lora is not None:
        v = v + inputs.v_lora.z @ inputs.v_lora.b
    if inputs.k_lora is not None:
        x = inputs.k_lora.z @ inputs.k_lora.b
        first, second = x.chunk(2, dim=-1)
        k = k + x * inputs.k_lora.cos + torch.cat([-second, first], -1) * inputs.k_lora.sin
    group = inputs.q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = (inputs.q @ k.transpose(1, 2) * inputs.scale).float()
    if inputs.softcap is not None:
        scores = (scores / inputs.softcap).tanh() * inputs.softcap
    positions = inputs.q_positions
    if isinstance(positions, int):
        positions = positions + torch.arange(inputs.q.shape[1])
    distance = positions.to(k.device)[:, None] - torch.arange(num_keys, device=k.device)
    hidden = (distance < 0) | (distance >= (inputs.window or math.inf))
    return scores.masked_fill(hidden, -math.inf).softmax(-1).to(v.dtype) @ v


def _moved(inputs: AttentionInputs, device: torch.device) -> AttentionInputs:
    """The same call on the device; positions stay on the CPU."""
    v_lora, k_lora = inputs.v_lora, inputs.k_lora
    return inputs._replace(
        q=inputs.q.to(device),
        k=inputs.k.to(device),
        v_base=inputs.v_base.to(device),
        v_lora=None if v_lora is None else ValueStrip(v_lora.z.to(device), v_lora.b.to(device)),
        k_lora=None
        if k_lora is None
        else KeyStrip(*(t.to(device) for t in (k_lora.z, k_lora.b, k_lora.cos, k_lora.sin))),
    )


def _moved_batch(inputs: PagedInputs, device: torch.device) -> PagedInputs:
    strips = inputs.strips
    assert strips is not None
    moved = PagedStrips(strips.z.to(device), strips.b.to(device), strips.adapter_index.to(device))
    return inputs._replace(
        strips=moved,
        **{
            name: getattr(inputs, name).to(device)
            for name in ("q", "k", "v_base", "block_table", "query_start", "kv_lens")
        },
    )
