"""The grid of attention calls, their random tensors, and how many operations and bytes they take. No timing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from precache.errors import ConfigError
from precache.ops.contract import AttentionInputs, ValueStrip

_SPARE_ROWS = 64  # behind the keys, as in the engine's buffers


class Heads(NamedTuple):
    """The attention of one layer of a model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"H{self.num_heads}/KV{self.num_kv_heads}/d{self.head_dim}"


def parse_heads(text: str) -> Heads:
    """``"32/8/128"``: heads, KV heads, head_dim. Raises ConfigError."""
    try:
        heads = Heads(*(int(part) for part in text.split("/")))
    except (TypeError, ValueError):
        heads = Heads(0, 0, 0)
    if min(heads) < 1 or heads.num_heads % heads.num_kv_heads:
        raise ConfigError(
            "--heads",
            text,
            "heads/KV heads/head_dim, such as 32/8/128, heads a multiple of KV heads",
        )
    return heads


@dataclass(frozen=True)
class Point:
    """``q_len`` queries at the end of ``context`` keys, one adapter of rank ``rank``."""

    heads: Heads
    context: int
    q_len: int
    rank: int
    dtype: torch.dtype

    @property
    def kind(self) -> str:
        return "decode" if self.q_len == 1 else "prefill"

    @property
    def operations(self) -> int:
        """Floating point operations of Q K^T and P V over the visible keys; those of the adapter are left out."""
        before = self.context - self.q_len
        visible = self.q_len * before + self.q_len * (self.q_len + 1) // 2
        return 4 * self.heads.num_heads * self.heads.head_dim * visible

    @property
    def bytes_read(self) -> int:
        """Bytes of k, v_base and z, each read once."""
        width = 2 * self.heads.num_kv_heads * self.heads.head_dim + self.rank
        return self.context * width * self.dtype.itemsize


class Problem(NamedTuple):
    """The tensors of one point."""

    inputs: AttentionInputs
    values: Tensor  # v_base + z b, as a cache without sharing holds them


def make_problem(point: Point, device: torch.device, seed: int) -> Problem:
    """Random tensors; keys and values are views of bigger buffers, as in the engine."""
    generator = torch.Generator().manual_seed(seed)
    heads, kv_len = point.heads, point.context

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(point.dtype).to(device)

    rows = kv_len + _SPARE_ROWS
    k, v_base = (random(heads.num_kv_heads, rows, heads.head_dim)[:, :kv_len] for _ in range(2))
    z = random(rows, point.rank)[:kv_len]
    b = random(heads.num_kv_heads, point.rank, heads.head_dim) / math.sqrt(point.rank)
    inputs = AttentionInputs(
        q=random(point.q_len, heads.num_heads, heads.head_dim).transpose(0, 1),
        k=k,
        v_base=v_base,
        scale=1 / math.sqrt(heads.head_dim),
        q_positions=kv_len - point.q_len,
        kv_start=0,
        v_lora=ValueStrip(z, b),
        k_lora=None,
        window=None,
        softcap=None,
    )
    values = v_base + (z.float() @ b.float()).to(point.dtype)
    return Problem(inputs, values)
