"""Blocked online-softmax attention in plain torch: the CPU backend, portable to CUDA and MPS.

Keys are the outer loop, so that a key block is widened, or expanded from its low-rank part, once
for all queries. The queries of one GQA group are rows of one matrix product. Decoding is the case
of one query block and, where the keys can be used as they are, one key block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from precache.ops.contract import AttentionInputs, AttentionOutput, KeyStrip


@dataclass(frozen=True, slots=True)
class Tuning:
    """Sizes measured on a 2-core AVX2 machine; any sizes give the same result."""

    query_block: int = 64
    key_block: int = 512
    decode_queries: int = 16  # up to so many queries meet all their keys in one block
    product_dtype: torch.dtype | None = None  # None: the dtype whose matrix products are fast


DEFAULT_TUNING = Tuning()


def attend(inputs: AttentionInputs, tuning: Tuning = DEFAULT_TUNING) -> AttentionOutput:
    """Attention in one pass over the visible keys; the others are never touched."""
    dtype = tuning.product_dtype or _fast_dtype(inputs.q)
    spans = _spans(inputs, tuning.query_block)
    first_key = min(span.seen_start for span in spans)
    last_key = max(span.seen_end for span in spans)
    key_block = tuning.key_block
    keys_used_as_stored = dtype == inputs.q.dtype and inputs.k_lora is None
    if keys_used_as_stored and inputs.q.shape[1] <= tuning.decode_queries:
        key_block = max(last_key - first_key, 1)
    scratch = _scratch(inputs, min(tuning.query_block, inputs.q.shape[1]) * key_block)
    blocks = [_QueryBlock(inputs, span, dtype, scratch) for span in spans]
    for start in range(first_key, last_key, key_block):
        keys = _load_keys(inputs, start, min(start + key_block, last_key), dtype)
        for block in blocks:
            block.attend(keys)
    return _collect(inputs, blocks)


def _fast_dtype(q: Tensor) -> torch.dtype:
    """The dtype of q, unless this CPU only emulates its products (measured: 100 times slower)."""
    features = _NATIVE_PRODUCTS.get(q.dtype)
    if q.device.type != "cpu" or features is None:
        return q.dtype
    capabilities = torch.cpu.get_capabilities()
    native = any(capabilities.get(feature) for feature in features)
    return q.dtype if native else torch.float32


_NATIVE_PRODUCTS = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16", "bf16"),
    torch.float16: ("avx512_fp16", "amx_fp16", "fp16_arith"),
}


class _Span(NamedTuple):
    """One query block, and the key indices that some of its rows, or all of them, see."""

    rows: slice
    positions: Tensor | int  # relative to the first key; the int is that of the first row
    seen_start: int
    seen_end: int
    clear_start: int
    clear_end: int


def _spans(inputs: AttentionInputs, query_block: int) -> list[_Span]:
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
        spans.append(_Span(rows, positions, seen_start, seen_end, clear_start, first + 1))
    return spans


class _KeyBlock(NamedTuple):
    start: int
    end: int
    k: Tensor  # [num_kv_heads, end - start, head_dim], its low-rank part added
    v: Tensor  # [num_kv_heads, end - start, head_dim]
    z: Tensor | None  # [end - start, rank]


def _load_keys(inputs: AttentionInputs, start: int, end: int, dtype: torch.dtype) -> _KeyBlock:
    k = inputs.k[:, start:end].to(dtype)
    if inputs.k_lora is not None:
        k = _rotated(inputs.k_lora, start, end, dtype).add_(k)
    z = None if inputs.v_lora is None else inputs.v_lora.z[start:end].to(dtype)
    return _KeyBlock(start, end, k, inputs.v_base[:, start:end].to(dtype), z)


def _rotated(strip: KeyStrip, start: int, end: int, dtype: torch.dtype) -> Tensor:
    """Expand and rotate the low-rank keys of one block, [num_kv_heads, end - start, head_dim]."""
    x = strip.z[start:end].to(dtype) @ strip.b.to(dtype)
    cos, sin = strip.cos[start:end].to(dtype), strip.sin[start:end].to(dtype)
    half = x.shape[-1] // 2
    rotated = x * cos
    rotated[..., :half].addcmul_(x[..., half:], sin[:, :half], value=-1)
    rotated[..., half:].addcmul_(x[..., :half], sin[:, half:])
    return rotated


class _QueryBlock:
    """Some queries of all heads, with their running softmax over the key blocks met so far."""

    def __init__(
        self, inputs: AttentionInputs, span: _Span, dtype: torch.dtype, scratch: Tensor
    ) -> None:
        self.span = span
        self._inputs = inputs
        self._scratch = scratch
        num_kv_heads, _, head_dim = inputs.k.shape
        q = inputs.q[:, span.rows].to(dtype)
        self._q = q.reshape(num_kv_heads, -1, head_dim)  # [num_kv_heads, group * queries, head_dim]
        self._running: _Running | None = None

    def attend(self, keys: _KeyBlock) -> None:
        """Add one block of keys to the running softmax."""
        start, end = max(keys.start, self.span.seen_start), min(keys.end, self.span.seen_end)
        if start >= end:
            return
        part = slice(start - keys.start, end - keys.start)
        scores = self._score(keys.k[:, part])
        self._hide(scores, start, end)
        z = None if keys.z is None else keys.z[part]
        if self._running is None:
            self._running = _Running(scores, keys.v[:, part], z)
        else:
            self._running.update(scores, keys.v[:, part], z)

    def _score(self, k: Tensor) -> Tensor:
        """Scores before masking, [num_kv_heads, group * queries, num_keys]."""
        shape = (*self._q.shape[:2], k.shape[1])
        scores = self._scratch[: math.prod(shape)].view(shape)
        # Half-precision products round the scores, as the eager attention of transformers does.
        product = scores if scores.dtype == k.dtype else k.new_empty(shape)
        scale, softcap = self._inputs.scale, self._inputs.softcap
        torch.baddbmm(product, self._q, k.transpose(1, 2), beta=0, alpha=scale, out=product)
        if product is not scores:
            scores.copy_(product)
        return scores if softcap is None else scores.div_(softcap).tanh_().mul_(softcap)

    def _hide(self, scores: Tensor, start: int, end: int) -> None:
        """Mask keys start..end, but compare only those that not every row sees."""
        span, window = self.span, self._inputs.window
        by_query = scores.view(-1, span.rows.stop - span.rows.start, end - start)
        if end > span.clear_end:
            cut = max(start, span.clear_end)
            late = _distance(span, cut, end, scores.device) < 0
            by_query[..., cut - start :].masked_fill_(late, -torch.inf)
        if window is not None and start < span.clear_start:
            cut = min(end, span.clear_start)
            early = _distance(span, start, cut, scores.device) >= window
            by_query[..., : cut - start].masked_fill_(early, -torch.inf)

    def finish(self, out: Tensor, lse: Tensor) -> None:
        """Write this block's rows of `out` [heads, q_len, head_dim] and `lse` [heads, q_len]."""
        rows = self.span.rows
        if self._running is None:
            out[:, rows] = 0
            lse[:, rows] = -torch.inf
            return
        shape = (out.shape[0], rows.stop - rows.start)
        out[:, rows] = self._running.output(self._inputs).view(*shape, -1)
        lse[:, rows] = self._running.lse().view(shape)


def _distance(span: _Span, start: int, end: int, device: torch.device) -> Tensor:
    """How far each query is past each of the keys start..end, [queries, end - start]."""
    positions = span.positions
    if isinstance(positions, int):
        num_queries = span.rows.stop - span.rows.start
        positions = torch.arange(positions, positions + num_queries, device=device)
    return positions.to(device).unsqueeze(1) - torch.arange(start, end, device=device)


class _Running:
    """Online softmax: maximum, sum, and the two accumulators (head_dim and rank) it rescales."""

    def __init__(self, scores: Tensor, v: Tensor, z: Tensor | None) -> None:
        # The clamp keeps a row that sees no key yet at exp(-inf) = 0; unclamped it is exp(NaN).
        self._max = scores.amax(-1, keepdim=True).clamp_min_(torch.finfo(scores.dtype).min)
        probs = scores.sub_(self._max).exp_()
        self._sum = probs.sum(-1, keepdim=True)
        self._acc = _product(probs, v)
        self._acc_lora = None if z is None else _product(probs, z)

    def update(self, scores: Tensor, v: Tensor, z: Tensor | None) -> None:
        """Meet another block of scores; they are overwritten."""
        new_max = torch.maximum(self._max, scores.amax(-1, keepdim=True))
        shrink = self._max.sub_(new_max).exp_()
        self._max = new_max
        probs = scores.sub_(new_max).exp_()
        self._sum.mul_(shrink).add_(probs.sum(-1, keepdim=True))
        _accumulate(self._acc.mul_(shrink), probs, v)
        if z is not None and self._acc_lora is not None:
            _accumulate(self._acc_lora.mul_(shrink), probs, z)

    def output(self, inputs: AttentionInputs) -> Tensor:
        """The attention output in the accumulators' dtype, [num_kv_heads, rows, head_dim]."""
        if inputs.v_lora is not None and self._acc_lora is not None:
            self._acc.baddbmm_(self._acc_lora, inputs.v_lora.b.to(self._acc.dtype))
        # The largest score adds exp(0): the sum is 1 or more, or 0 for a row that sees no key.
        return self._acc.div_(self._sum.clamp_min(1))

    def lse(self) -> Tensor:
        """Log-sum-exp of the scores, [num_kv_heads, rows, 1]."""
        return self._sum.log().add_(self._max)


def _product(probs: Tensor, values: Tensor) -> Tensor:
    """probs [num_kv_heads, rows, n] times values [num_kv_heads, n, d] or, shared, [n, d]."""
    return torch.matmul(probs.to(values.dtype), values).to(probs.dtype)


def _accumulate(acc: Tensor, probs: Tensor, values: Tensor) -> None:
    if probs.dtype != values.dtype:
        acc.add_(_product(probs, values))
    elif values.dim() == 3:
        acc.baddbmm_(probs, values)
    else:
        acc.view(-1, acc.shape[-1]).addmm_(probs.view(-1, probs.shape[-1]), values)


def _scratch(inputs: AttentionInputs, scores_per_head: int) -> Tensor:
    """Room for one block of scores, reused by all blocks: fresh memory costs page faults."""
    dtype = torch.float64 if inputs.q.dtype == torch.float64 else torch.float32
    return inputs.q.new_empty(inputs.q.shape[0] * scores_per_head, dtype=dtype)


def _collect(inputs: AttentionInputs, blocks: list[_QueryBlock]) -> AttentionOutput:
    num_heads, q_len, _ = inputs.q.shape
    dtype = torch.float64 if inputs.q.dtype == torch.float64 else torch.float32
    out = torch.empty_like(inputs.q, memory_format=torch.contiguous_format)
    lse = inputs.q.new_empty(num_heads, q_len, dtype=dtype)
    for block in blocks:
        block.finish(out, lse)
    return AttentionOutput(out, lse)
