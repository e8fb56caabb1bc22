"""Loads one block of keys and values for the CPU backend, its low-rank parts expanded if asked."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from precache.ops.contract import AttentionInputs


class Workspace:
    """Memory that all blocks of one call reuse.

    On Linux each large tensor is fresh memory, and its page faults take 15 times as long as
    filling it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flat: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor; it is overwritten when the same name is taken again."""
        size = math.prod(shape)
        flat = self._flat.get(name)
        if flat is None or flat.numel() < size:
            flat = self._flat[name] = torch.empty(size, dtype=dtype, device=self._device)
        return flat[:size].view(shape)


class KeyBlock(NamedTuple):
    """Keys start..end in the dtype of the products; valid until the next one is loaded."""

    start: int
    end: int
    k: Tensor  # [num_kv_heads, end - start, head_dim], its low-rank part added
    v: Tensor  # [num_kv_heads, end - start, head_dim], its low-rank part added unless in z
    z: Tensor | None  # [end - start, rank]

    def part(self, start: int, end: int) -> KeyBlock:
        """Keys start..end of this block."""
        if (start, end) == (self.start, self.end):
            return self
        inner = slice(start - self.start, end - self.start)
        z = None if self.z is None else self.z[inner]
        return KeyBlock(start, end, self.k[:, inner], self.v[:, inner], z)


class KeyBlocks:
    """The keys and values of one call, a block at a time."""

    def __init__(
        self,
        inputs: AttentionInputs,
        dtype: torch.dtype,
        expand_values: bool,
        workspace: Workspace,
    ) -> None:
        self._inputs = inputs
        self._dtype = dtype
        self._expand_values = expand_values
        self._workspace = workspace

    def load(self, start: int, end: int) -> KeyBlock:
        """Keys start..end. Nothing is copied where the cache can be used as it is."""
        inputs = self._inputs
        k, v = inputs.k[:, start:end], inputs.v_base[:, start:end]
        k = self._widened("k", k) if inputs.k_lora is None else self._with_lora_keys(k, start, end)
        if inputs.v_lora is None:
            return KeyBlock(start, end, k, self._widened("v", v), None)
        # Packed: a product with a strided z takes twice as long as the copy and the product.
        z = inputs.v_lora.z[start:end].to(self._dtype).contiguous()
        if not self._expand_values:
            return KeyBlock(start, end, k, self._widened("v", v), z)
        expanded = self._take("v", v).copy_(v)
        b = inputs.v_lora.b.to(self._dtype)
        return KeyBlock(start, end, k, expanded.baddbmm_(z.expand(b.shape[0], -1, -1), b), None)

    def _widened(self, name: str, tensor: Tensor) -> Tensor:
        if tensor.dtype == self._dtype:
            return tensor
        return self._take(name, tensor).copy_(tensor)

    def _with_lora_keys(self, k: Tensor, start: int, end: int) -> Tensor:
        """k + rotate(z b), with rotate(x) = x * cos + rotate_half(x) * sin."""
        strip = self._inputs.k_lora
        assert strip is not None
        z, b = strip.z[start:end].to(self._dtype), strip.b.to(self._dtype)
        cos, sin = strip.cos[start:end].to(self._dtype), strip.sin[start:end].to(self._dtype)
        x = torch.bmm(z.expand(b.shape[0], -1, -1), b, out=self._take("x", k))
        total = torch.mul(x, cos, out=self._take("k", k)).add_(k)
        half = x.shape[-1] // 2
        total[..., :half].addcmul_(x[..., half:], sin[:, :half], value=-1)
        total[..., half:].addcmul_(x[..., :half], sin[:, half:])
        return total

    def _take(self, name: str, like: Tensor) -> Tensor:
        return self._workspace.take(name, tuple(like.shape), self._dtype)
