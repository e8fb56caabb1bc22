"""Hand-made paged batches: keys, values and strips in pages that lie in no order, with a tail behind each."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from precache.ops import AttentionOutput, ValueStrip, reference
from precache.ops.contract import AttentionInputs
from precache.ops.paged import PagedInputs, PagedStrips
from tests.ops.cases import in_float32

BASE = -1


@dataclass(frozen=True)
class Batch:
    """Sequences as (queries, tokens, adapter); the defaults mix a prefill, an extension and decoding."""

    sequences: tuple[tuple[int, int, int], ...] = (
        (9, 9, 1),
        (1, 37, 0),
        (5, 22, BASE),
        (1, 1, 2),
        (3, 50, 2),
    )
    page_size: int = 8
    num_kv_heads: int = 2
    group: int = 3
    head_dim: int = 16
    num_adapters: int = 3
    rank: int | None = 4
    window: int | None = None
    softcap: float | None = None
    dtype: torch.dtype = torch.float32

    def inputs(self, seed: int = 0) -> PagedInputs:
        """What no sequence may read is NaN: pages that belong to nobody, rows past a sequence's end."""
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(self.dtype)

        counts = [-(-tokens // self.page_size) for _, tokens, _ in self.sequences]
        num_pages = sum(counts) + 3
        order = torch.randperm(num_pages, generator=generator).tolist()
        table = torch.full((len(counts), max(counts)), num_pages - 1, dtype=torch.int32)
        numbers = 2 * self.num_kv_heads * self.head_dim + self.num_adapters * (self.rank or 0) + 7
        pages = torch.full((num_pages, self.page_size, numbers), torch.nan, dtype=self.dtype)
        for seq, ((_, tokens, _), count) in enumerate(zip(self.sequences, counts, strict=True)):
            for index in range(count):
                page = order.pop()
                table[seq, index] = page
                rows = min(tokens - index * self.page_size, self.page_size)
                pages[page, :rows] = random(rows, numbers)
        k, v_base, tail = self._views(pages)
        lengths = torch.tensor([queries for queries, _, _ in self.sequences])
        return PagedInputs(
            q=random(int(lengths.sum()), self.num_kv_heads * self.group, self.head_dim) * 2,
            k=k,
            v_base=v_base,
            block_table=table,
            query_start=torch.cat([torch.zeros(1), lengths.cumsum(0)]).to(torch.int32),
            kv_lens=torch.tensor([tokens for _, tokens, _ in self.sequences], dtype=torch.int32),
            max_q_len=int(lengths.max()),
            max_kv_len=max(tokens for _, tokens, _ in self.sequences),
            scale=1 / math.sqrt(self.head_dim),
            strips=None if self.rank is None else self._strips(tail, self.rank, random),
            window=self.window,
            softcap=self.softcap,
        )

    def _views(self, pages: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """k, v_base and the tail of [num_pages, page_size, numbers]."""
        width = self.num_kv_heads * self.head_dim
        k, v_base, tail = pages.split([width, width, pages.shape[2] - 2 * width], dim=2)
        heads = (*pages.shape[:2], self.num_kv_heads, self.head_dim)
        return k.unflatten(2, heads[2:]), v_base.unflatten(2, heads[2:]), tail

    def _strips(self, tail: Tensor, rank: int, random) -> PagedStrips:
        z = tail[..., : self.num_adapters * rank].unflatten(2, (self.num_adapters, rank))
        b = random(self.num_adapters, self.num_kv_heads, rank, self.head_dim) / math.sqrt(rank)
        adapters = [adapter for _, _, adapter in self.sequences]
        return PagedStrips(z, b, torch.tensor(adapters, dtype=torch.int32))


def sequence(inputs: PagedInputs, seq: int) -> AttentionInputs:
    """One sequence of a batch, gathered into one buffer."""
    kv_len = int(inputs.kv_lens[seq])
    start, end = inputs.query_start[seq : seq + 2].tolist()
    page_size = inputs.k.shape[1]
    positions = torch.arange(kv_len)
    pages, rows = inputs.block_table[seq, positions // page_size].long(), positions % page_size
    v_lora, strips = None, inputs.strips
    if strips is not None and (adapter := int(strips.adapter_index[seq])) >= 0:
        v_lora = ValueStrip(strips.z[pages, rows, adapter], strips.b[adapter])
    return AttentionInputs(
        q=inputs.q[start:end].transpose(0, 1),
        k=inputs.k[pages, rows].transpose(0, 1),
        v_base=inputs.v_base[pages, rows].transpose(0, 1),
        scale=inputs.scale,
        q_positions=kv_len - (end - start),
        kv_start=0,
        v_lora=v_lora,
        k_lora=None,
        window=inputs.window,
        softcap=inputs.softcap,
    )


def paged_reference(inputs: PagedInputs) -> AttentionOutput:
    """Every sequence by the definition, in float32, one after the other."""
    parts = [
        reference.attend(in_float32(sequence(inputs, seq)))
        for seq in range(inputs.kv_lens.shape[0])
    ]
    return AttentionOutput(
        torch.cat([part.out for part in parts], dim=1),
        torch.cat([part.lse for part in parts], dim=1),
    )
