"""What one cached token is made of, and how many bytes that takes. No storage here."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class CacheLayout:
    """The base part of a cached token: k (after RoPE) and v_base of every layer."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def base_bytes_per_token(self) -> int:
        """Bytes of k and v_base of all layers for one token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True)
class StripLayout:
    """The low-rank part that one reader keeps of a token: per layer the ranks of v_lora and k_lora (0: none)."""

    key: str
    v_ranks: tuple[int, ...]
    k_ranks: tuple[int, ...]

    @property
    def numbers_per_token(self) -> int:
        """Cached numbers (not bytes) for one token over all layers."""
        return sum(self.v_ranks) + sum(self.k_ranks)
