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
    """What is kept of a token beside k and v, most often for one reader: per layer so many numbers (0: none).

    ``v_ranks`` and ``k_ranks`` are the widths of v_lora and k_lora, ``h_widths`` those of hidden states that enter a
    layer. A strip without numbers only records which tokens its reader's passes have been over. ``in_base`` says that
    these passes wrote k and v of the covered rows, so that the rows are as old as the reader's weights.
    """

    key: str
    v_ranks: tuple[int, ...] = ()
    k_ranks: tuple[int, ...] = ()
    h_widths: tuple[int, ...] = ()
    in_base: bool = False

    @property
    def numbers_per_token(self) -> int:
        """Cached numbers (not bytes) for one token over all layers."""
        return sum(self.v_ranks) + sum(self.k_ranks) + sum(self.h_widths)

    @property
    def widest(self) -> int:
        """Numbers of one token in the largest tensor."""
        return max((*self.v_ranks, *self.k_ranks, *self.h_widths), default=0)
