"""Online softmax of one block of queries over key blocks, for the CPU backend.

Rows are (query, head of the group) pairs of one KV head, query first. A key block that all rows
see, or that is exactly their causal triangle, may go through torch's fused CPU kernel, which is
bound by its matrix products; torch's separate softmax steps take as long again. All other blocks
are masked and computed step by step. Both feed the same running softmax.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from precache.ops.contract import AttentionInputs
from precache.ops.fused import fused_attention
from precache.ops.key_blocks import KeyBlock, Workspace
from precache.ops.numerics import accumulator_dtype, cap_scores, weigh


class Span(NamedTuple):
    """The queries of one block, and the key indices that some of them, or all of them, see."""

    rows: slice
    positions: Tensor | int  # relative to the first key; the int is that of the first query
    seen_start: int
    seen_end: int
    clear_start: int
    clear_end: int

    def edges(self) -> tuple[int, ...]:
        """Where the keys that all queries see begin and end; the causal triangle begins there."""
        return (self.seen_start, self.clear_start, self.clear_end - 1, self.seen_end)

    def distance(self, start: int, end: int, device: torch.device) -> Tensor:
        """How far each query is past each of the keys start..end, [num_queries, end - start]."""
        positions = self.positions
        if isinstance(positions, int):
            num_queries = self.rows.stop - self.rows.start
            positions = torch.arange(positions, positions + num_queries, device=device)
        return positions.to(device).unsqueeze(1) - torch.arange(start, end, device=device)


class QueryBlock:
    """Some queries of all heads, with their running softmax over the key blocks met so far."""

    def __init__(
        self,
        inputs: AttentionInputs,
        span: Span,
        dtype: torch.dtype,
        fused: bool,
        workspace: Workspace,
    ) -> None:
        self.span = span
        self._inputs = inputs
        self._fused = fused
        self._workspace = workspace
        num_kv_heads, _, head_dim = inputs.k.shape
        group = inputs.q.shape[0] // num_kv_heads
        q = inputs.q[:, span.rows].view(num_kv_heads, group, -1, head_dim).transpose(1, 2)
        # [num_kv_heads, num_queries, group, head_dim], and the same memory as rows
        self._q = q.to(dtype).contiguous()
        self._q_rows = self._q.view(num_kv_heads, -1, head_dim)
        self._running = RunningSoftmax()

    def attend(self, block: KeyBlock) -> None:
        """Add one block of keys to the running softmax."""
        span = self.span
        start, end = max(block.start, span.seen_start), min(block.end, span.seen_end)
        if start >= end:
            return
        keys = block.part(start, end)
        all_seen = end <= span.clear_end
        # The first query sees one key of a triangle, the next one two, and so on.
        triangle = start == span.clear_end - 1 and isinstance(span.positions, int)
        if self._fused and start >= span.clear_start and (all_seen or triangle):
            self._attend_fused(keys, is_causal=not all_seen)
            return
        scores = self._scores(keys.k)
        self._hide(scores, start, end)
        self._running.add_scores(scores, keys.v, keys.z)

    def _attend_fused(self, keys: KeyBlock, is_causal: bool) -> None:
        num_kv_heads, num_queries, group, _ = self._q.shape
        q = self._q.transpose(1, 2)
        out, lse = fused_attention(q, keys.k, keys.v, self._inputs.scale, is_causal)
        # Queries come before heads in the kernel's memory: nothing is copied.
        rows = (num_kv_heads, num_queries * group, -1)
        lse = lse.transpose(1, 2).reshape(rows)
        self._running.add_part(out.transpose(1, 2).reshape(rows).to(lse.dtype), lse)

    def _scores(self, k: Tensor) -> Tensor:
        """Scores before masking, [num_kv_heads, rows, num_keys]."""
        shape = (*self._q_rows.shape[:2], k.shape[1])
        dtype = accumulator_dtype(self._inputs.q)
        scores = self._workspace.take("scores", shape, dtype)
        # Half-precision products round the scores, as the eager attention of transformers does.
        exact = k.dtype == dtype
        product = scores if exact else self._workspace.take("product", shape, k.dtype)
        scale = self._inputs.scale
        torch.baddbmm(product, self._q_rows, k.transpose(1, 2), beta=0, alpha=scale, out=product)
        return cap_scores(scores if exact else scores.copy_(product), self._inputs.softcap)

    def _hide(self, scores: Tensor, start: int, end: int) -> None:
        """Mask keys start..end, but compare only those that not every query sees."""
        span, window = self.span, self._inputs.window
        _, num_queries, group, _ = self._q.shape
        by_query = scores.view(-1, num_queries, group, end - start)
        if end > span.clear_end:
            cut = max(start, span.clear_end)
            late = span.distance(cut, end, scores.device) < 0
            by_query[..., cut - start :].masked_fill_(late.unsqueeze(1), -torch.inf)
        if window is not None and start < span.clear_start:
            cut = min(end, span.clear_start)
            early = span.distance(start, cut, scores.device) >= window
            by_query[..., : cut - start].masked_fill_(early.unsqueeze(1), -torch.inf)

    def finish(self, out: Tensor, lse: Tensor) -> None:
        """Write this block's queries of `out` [num_kv_heads, q_len, group, head_dim] and `lse`."""
        result = self._running.result(self._inputs)
        rows = self.span.rows
        if result is None:
            out[:, rows] = 0
            lse[:, rows] = -torch.inf
            return
        out[:, rows] = result[0].view(self._q.shape)
        lse[:, rows] = result[1].view(self._q.shape[:3])


class RunningSoftmax:
    """Maximum, sum, and the accumulators (head_dim wide, and rank wide) that they rescale.

    All are [num_kv_heads, rows, ...]. Before the first block there is nothing.
    """

    def __init__(self) -> None:
        self._max: Tensor | None = None
        self._sum: Tensor
        self._acc: Tensor
        self._acc_lora: Tensor | None = None

    def add_scores(self, scores: Tensor, v: Tensor, z: Tensor | None) -> None:
        """Meet the masked scores of a key block; they are overwritten."""
        maximum = scores.amax(-1, keepdim=True)
        if self._max is None:
            # A row that sees no key yet: exp(-inf) = 0, where an infinite maximum gives NaN.
            self._max = maximum.clamp_min_(torch.finfo(maximum.dtype).min)
            probs = scores.sub_(self._max).exp_()
            self._sum = probs.sum(-1, keepdim=True)
            self._acc = weigh(probs, v)
            self._acc_lora = None if z is None else weigh(probs, z)
            return
        self._raise_max(self._max, maximum)
        probs = scores.sub_(self._max).exp_()
        self._sum.add_(probs.sum(-1, keepdim=True))
        _accumulate(self._acc, probs, v)
        if z is not None and self._acc_lora is not None:
            _accumulate(self._acc_lora, probs, z)

    def add_part(self, out: Tensor, lse: Tensor) -> None:
        """Meet a key block of which the attention is known; every row must see one of its keys."""
        if self._max is None:
            self._max, self._sum, self._acc = lse, torch.ones_like(lse), out
            return
        self._raise_max(self._max, lse)
        weight = lse.sub_(self._max).exp_()
        self._sum.add_(weight)
        self._acc.addcmul_(out, weight)

    def _raise_max(self, old: Tensor, maximum: Tensor) -> None:
        self._max = torch.maximum(old, maximum)
        shrink = old.sub_(self._max).exp_()
        self._sum.mul_(shrink)
        self._acc.mul_(shrink)
        if self._acc_lora is not None:
            self._acc_lora.mul_(shrink)

    def result(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor] | None:
        """Attention output and log-sum-exp, or None if no block was met."""
        if self._max is None:
            return None
        if inputs.v_lora is not None and self._acc_lora is not None:
            self._acc.baddbmm_(self._acc_lora, inputs.v_lora.b.to(self._acc.dtype))
        # The largest score adds exp(0): the sum is 1 or more, or 0 for a row that sees no key.
        out = self._acc.div_(self._sum.clamp_min(1))
        return out, self._sum.log().add_(self._max)


def _accumulate(acc: Tensor, probs: Tensor, values: Tensor) -> None:
    if probs.dtype == values.dtype and values.dim() == 3:
        acc.baddbmm_(probs, values)
    else:
        acc.add_(weigh(probs, values))
