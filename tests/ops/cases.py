"""Random attention calls for the tests of ops."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from precache.ops.contract import AttentionInputs, KeyStrip, ValueStrip


@dataclass(frozen=True)
class Case:
    """One attention call; the defaults decode the last of 40 tokens with a value strip of rank 4."""

    q_len: int = 1
    kv_len: int = 40
    num_kv_heads: int = 2
    group: int = 3
    head_dim: int = 16
    rank: int | None = 4
    key_rank: int | None = None
    q_positions: int | list[int] | None = None  # None: the last q_len of the keys' positions
    kv_start: int = 0
    window: int | None = None
    softcap: float | None = None
    dtype: torch.dtype = torch.float32

    def inputs(self, seed: int = 0) -> AttentionInputs:
        """Keys, values and strips are views of bigger buffers, as in the engine's cache."""
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(self.dtype)

        q_positions = self.q_positions
        if q_positions is None:
            q_positions = self.kv_start + self.kv_len - self.q_len
        kv_shape = (self.num_kv_heads, self.kv_len + 5, self.head_dim)
        # Queries of norm 2 * sqrt(head_dim) keep the softmax away from a plain average.
        return AttentionInputs(
            q=random(self.q_len, self.num_kv_heads * self.group, self.head_dim).transpose(0, 1) * 2,
            k=random(*kv_shape)[:, : self.kv_len],
            v_base=random(*kv_shape)[:, : self.kv_len],
            scale=1 / math.sqrt(self.head_dim),
            q_positions=q_positions
            if isinstance(q_positions, int)
            else torch.tensor(q_positions, dtype=torch.int64),
            kv_start=self.kv_start,
            v_lora=None if self.rank is None else ValueStrip(*self._strip(random, self.rank)),
            k_lora=None if self.key_rank is None else self._key_strip(random, self.key_rank),
            window=self.window,
            softcap=self.softcap,
        )

    def _strip(self, random, rank: int) -> tuple[Tensor, Tensor]:
        z = random(self.kv_len, 3 * rank)[:, rank : 2 * rank]
        return z, random(self.num_kv_heads, rank, self.head_dim) / math.sqrt(rank)

    def _key_strip(self, random, rank: int) -> KeyStrip:
        z, b = self._strip(random, rank)
        positions = self.kv_start + torch.arange(self.kv_len)
        frequencies = 100 ** -(torch.arange(0, self.head_dim, 2) / self.head_dim)
        angles = torch.outer(positions, frequencies).repeat(1, 2)
        return KeyStrip(z, b, angles.cos().to(self.dtype), angles.sin().to(self.dtype))


def in_float32(inputs: AttentionInputs) -> AttentionInputs:
    """The same numbers, so that the reference has no rounding of its own."""

    def widen(value: object) -> object:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.float()
        if isinstance(value, ValueStrip):
            return ValueStrip(value.z.float(), value.b.float())
        if isinstance(value, KeyStrip):
            return KeyStrip(*(t.float() for t in (value.z, value.b, value.cos, value.sin)))
        return value

    return AttentionInputs(*(widen(value) for value in inputs))


def segment(inputs: AttentionInputs, start: int, end: int) -> AttentionInputs:
    """The same queries over keys start..end alone."""
    v_lora, k_lora = inputs.v_lora, inputs.k_lora
    return inputs._replace(
        k=inputs.k[:, start:end],
        v_base=inputs.v_base[:, start:end],
        kv_start=inputs.kv_start + start,
        v_lora=None if v_lora is None else ValueStrip(v_lora.z[start:end], v_lora.b),
        k_lora=None
        if k_lora is None
        else KeyStrip(k_lora.z[start:end], k_lora.b, k_lora.cos[start:end], k_lora.sin[start:end]),
    )
