"""Identity of adapter weights: SHA-256 over a typed, versioned encoding.

Owns what two adapters must share to count as the same. Never uses names, paths, hash() or object ids, so a digest is
equal in every process and on every machine.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from precache.adapters.checks import RawModule

_WEIGHTS_TAG = b"precache/lora-weights/1"
_STRIP_TAG = b"precache/lora-strip/1"

# The modules whose X A is cached; adapters that agree on these A share one strip.
STRIP_TARGETS = ("k_proj", "v_proj")


class _Encoder:
    """Feeds length-prefixed fields into SHA-256, so that no two inputs have the same encoding."""

    def __init__(self, tag: bytes) -> None:
        self._hash = hashlib.sha256()
        self.add_bytes(tag)

    def add_bytes(self, data: bytes | bytearray | memoryview) -> None:
        self._hash.update(struct.pack(">Q", len(data)))
        self._hash.update(data)

    def add_text(self, text: str) -> None:
        self.add_bytes(text.encode())

    def add_module(self, layer: int, target: str) -> None:
        self._hash.update(struct.pack(">Q", layer))
        self.add_text(target)

    def add_float(self, value: float) -> None:
        self._hash.update(struct.pack(">d", value))

    def add_array(
        self, dtype: str, shape: Iterable[int], data: bytes | bytearray | memoryview
    ) -> None:
        self.add_text(dtype)
        dims = tuple(shape)
        self._hash.update(struct.pack(f">Q{len(dims)}Q", len(dims), *dims))
        self.add_bytes(data)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def weights_digest(modules: Mapping[tuple[int, str], RawModule]) -> str:
    """Digest of everything that shapes the result, over the file's own dtypes and bytes."""
    encoder = _Encoder(_WEIGHTS_TAG)
    for (layer, target), module in sorted(modules.items()):
        encoder.add_module(layer, target)
        encoder.add_float(module.scaling)
        for raw in module.tensors:
            encoder.add_array(raw.dtype, raw.shape, raw.data)
    return encoder.hexdigest()


def strip_digest(lora_a: Mapping[tuple[int, str], Tensor]) -> str:
    """Digest of the A matrices whose products are cached, as loaded: equal ones give bitwise equal strips."""
    encoder = _Encoder(_STRIP_TAG)
    for (layer, target), tensor in sorted(lora_a.items()):
        if target in STRIP_TARGETS:
            encoder.add_module(layer, target)
            encoder.add_array(str(tensor.dtype), tensor.shape, tensor_bytes(tensor))
    return encoder.hexdigest()


def tensor_bytes(tensor: Tensor) -> bytes:
    """The raw bytes of a tensor; two tensors share them exactly when they are bitwise equal."""
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
