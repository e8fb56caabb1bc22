"""The adapters that are loaded now, by name, and their A matrices stacked for one GEMM.

Owns names and registration. A load either registers a fully checked adapter or changes nothing; requests that run
while an adapter is replaced or removed keep the `Adapter` object they started with.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from precache.adapters.checks import MAX_LORA_RANK
from precache.adapters.spec import ModelShape
from precache.adapters.weights import LoraModule, LoraWeights, load_adapter
from precache.errors import AdapterError, AdapterExistsError, UnknownAdapterError

BASE_NAME = "base"  # the model without an adapter

Admit = Callable[[Sequence["Adapter"]], None]
"""Looks at the adapters as they would be after a change, and raises if they may not be."""

_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,128}")


class AdapterNameError(AdapterError):
    """A name that no adapter may have."""

    def __init__(self, name: object) -> None:
        self.name = name
        super().__init__(
            f"adapter name: got {name!r}, allowed are 1 to 128 characters of A-Z a-z 0-9 . _ : / - "
            f"and not {BASE_NAME!r}, which is the model without an adapter"
        )


@dataclass(frozen=True, eq=False)
class Adapter:
    """One loaded adapter. Two adapters compare by identity; equal weights have equal digests."""

    name: str
    weights: LoraWeights
    path: Path
    shape: ModelShape

    @property
    def digest(self) -> str:
        return self.weights.digest

    @property
    def a_digest(self) -> str:
        return self.weights.a_digest

    @cached_property
    def targets(self) -> frozenset[str]:
        """The projections that have LoRA in at least one layer."""
        return frozenset(target for _, target in self.weights.modules)

    def has(self, target: str) -> bool:
        """Whether any layer has LoRA on `target`."""
        return target in self.targets

    def module(self, layer: int, target: str) -> LoraModule | None:
        return self.weights.modules.get((layer, target))

    def rank(self, layer: int, target: str) -> int:
        """The rank of a module, 0 where the adapter has none."""
        module = self.module(layer, target)
        return 0 if module is None else module.lora_a.shape[0]

    def ranks(self, target: str) -> tuple[int, ...]:
        """The rank of every layer's module."""
        return self._ranks.get(target, (0,) * self.shape.num_layers)

    @cached_property
    def _ranks(self) -> Mapping[str, tuple[int, ...]]:
        layers = range(self.shape.num_layers)
        return {
            target: tuple(self.rank(layer, target) for layer in layers) for target in self.targets
        }

    def value_b(self, layer: int) -> Tensor | None:
        """Scaled B of v_proj by KV head: [num_kv_heads, rank, head_dim], contiguous."""
        return self._b_by_head["v_proj"].get(layer)

    def key_b(self, layer: int) -> Tensor | None:
        """Scaled B of k_proj by KV head: [num_kv_heads, rank, head_dim], contiguous."""
        return self._b_by_head["k_proj"].get(layer)

    @cached_property
    def _b_by_head(self) -> Mapping[str, Mapping[int, Tensor]]:
        return {
            wanted: {
                layer: self._split_heads(module.lora_b)
                for (layer, target), module in self.weights.modules.items()
                if target == wanted
            }
            for wanted in ("k_proj", "v_proj")
        }

    def _split_heads(self, lora_b: Tensor) -> Tensor:
        heads = lora_b.view(self.shape.num_kv_heads, self.shape.head_dim, -1)
        return heads.transpose(1, 2).contiguous()


class AdapterBank:
    """Loads, replaces and removes adapters for one model. Safe to change from another thread than the reader's."""

    def __init__(
        self,
        shape: ModelShape,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        max_lora_rank: int = MAX_LORA_RANK,
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.max_lora_rank = max_lora_rank
        self._lock = threading.Lock()
        self._adapters: dict[str, Adapter] = {}  # replaced as a whole, never changed in place
        self._stacks: dict[tuple[int, str, tuple[str, ...]], tuple[Tensor, tuple[slice, ...]]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The names in the order of loading."""
        return tuple(self._adapters)

    def __len__(self) -> int:
        return len(self._adapters)

    def __iter__(self) -> Iterator[Adapter]:
        return iter(self._adapters.values())

    def __contains__(self, name: object) -> bool:
        return name in self._adapters

    def get(self, name: str) -> Adapter:
        """The adapter of exactly that name; UnknownAdapterError when there is none."""
        return self._get(self._adapters, name)

    def load(self, name: str, path: str | Path, admit: Admit | None = None) -> Adapter:
        """Load a folder under a new name, or return what is loaded when the weights are the same.

        Raises AdapterNameError, every error of `load_adapter`, AdapterExistsError when the name has other weights, or
        what `admit` raises; nothing is loaded then.
        """
        require_name(name)
        adapter = self._read(name, path)
        with self._lock:
            existing = self._adapters.get(name)
            if existing is None:
                self._publish({**self._adapters, name: adapter}, admit)
                return adapter
        if existing.digest != adapter.digest:
            raise AdapterExistsError(name)
        return existing

    def replace(
        self, name: str, path: str | Path, admit: Admit | None = None
    ) -> tuple[Adapter, Adapter]:
        """Load other weights under a name in use; returns the old and the new adapter.

        Both are the same object when the weights did not change. Raises UnknownAdapterError, an error of
        `load_adapter`, or what `admit` raises; the old adapter stays then.
        """
        self.get(name)
        adapter = self._read(name, path)
        with self._lock:
            old = self._get(self._adapters, name)
            if old.digest == adapter.digest:
                return old, old
            self._publish({**self._adapters, name: adapter}, admit)
        return old, adapter

    def remove(self, name: str) -> Adapter:
        """Forget an adapter and return it; UnknownAdapterError when there is none."""
        with self._lock:
            removed = self._get(self._adapters, name)
            self._publish({key: kept for key, kept in self._adapters.items() if key != name})
        return removed

    def take(self, loaded: Iterable[Adapter], admit: Admit | None = None) -> None:
        """Register adapters that were made for this model, another bank's or planned ones, in place of all here.

        Raises what `admit` raises; nothing changes then.
        """
        with self._lock:
            self._publish({adapter.name: adapter for adapter in loaded}, admit)

    def stacked_a(
        self, layer: int, target: str, adapters: tuple[Adapter, ...]
    ) -> tuple[Tensor, tuple[slice, ...]]:
        """The A of one module for several adapters as one [sum of ranks, in_features] tensor, and each one's rows.

        An adapter without the module has an empty slice. The caller passes adapters with equal `a_digest` once.
        """
        key = (layer, target, tuple(adapter.digest for adapter in adapters))
        stack = self._stacks.get(key)
        if stack is None:
            stack = self._stacks[key] = self._stack(layer, target, adapters)
        return stack

    def _stack(
        self, layer: int, target: str, adapters: tuple[Adapter, ...]
    ) -> tuple[Tensor, tuple[slice, ...]]:
        modules = [adapter.module(layer, target) for adapter in adapters]
        parts = [module.lora_a for module in modules if module is not None]
        rows: list[slice] = []
        start = 0
        for adapter in adapters:
            stop = start + adapter.rank(layer, target)
            rows.append(slice(start, stop))
            start = stop
        if len(parts) == 1:
            return parts[0], tuple(rows)  # no second copy for a single adapter
        empty = torch.empty(0, self.shape.in_features[target], dtype=self.dtype, device=self.device)
        return torch.cat([empty, *parts]), tuple(rows)

    def _read(self, name: str, path: str | Path) -> Adapter:
        weights = load_adapter(
            path,
            self.shape,
            dtype=self.dtype,
            device=self.device,
            max_lora_rank=self.max_lora_rank,
        )
        return Adapter(name, weights, Path(path), self.shape)

    def _publish(self, adapters: dict[str, Adapter], admit: Admit | None = None) -> None:
        if admit is not None:
            admit(tuple(adapters.values()))
        self._adapters = adapters
        self._stacks = {}

    @staticmethod
    def _get(adapters: Mapping[str, Adapter], name: str) -> Adapter:
        if name not in adapters:
            raise UnknownAdapterError(name, known=adapters)
        return adapters[name]


def require_name(name: str) -> None:
    """Raise AdapterNameError unless `name` may name an adapter."""
    if not isinstance(name, str) or name == BASE_NAME or _NAME.fullmatch(name) is None:
        raise AdapterNameError(name)
