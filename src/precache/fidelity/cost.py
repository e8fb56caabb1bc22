"""What a policy had to run, counted: rows of decoder layers and floating-point operations. No clock here.

Counted are products of matrices by shape (2 m n k) as they are run, LoRA and strips included, and attention as
4 heads head_dim for every key that a query sees. Attention kernels differ in what they compute and throw away, so they
are not looked into. Elementwise work is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from precache import Engine
from precache.engine.forward import Forward

_ATEN = torch.ops.aten


@dataclass(frozen=True)
class Cost:
    """``layer_rows`` are rows through decoder layers, summed over the layers; bytes are of what was cached."""

    layer_rows: int = 0
    flops: int = 0
    cache_bytes: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.layer_rows + other.layer_rows,
            self.flops + other.flops,
            self.cache_bytes + other.cache_bytes,
        )


class CostMeter:
    """Counts what the engine's model runs in this thread while it is open."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open = ExitStack()
        self._products = _Products()
        self._layer_rows = 0
        self._keys_seen = 0

    def __enter__(self) -> Self:
        for layer in self._engine.model.decoder.layers:
            handle = layer.register_forward_pre_hook(self._see, with_kwargs=True)
            self._open.callback(handle.remove)
        self._open.enter_context(self._products)
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def cost(self) -> Cost:
        """What was run so far, and what is cached now."""
        shape = self._engine.model.shape
        attention = 4 * shape.out_features["q_proj"] * self._keys_seen
        held = self._engine.stats().bytes_held
        return Cost(self._layer_rows, self._products.flops + attention, held)

    def _see(self, layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        self._layer_rows += args[0].shape[1]
        forward = next(value for value in kwargs.values() if isinstance(value, Forward))
        if not forward.keys_values_only:
            self._keys_seen += sum(position + 1 for position in forward.positions())


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operations of linear layers and low-rank products; batched products belong to the attention."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        operands = _OPERANDS.get(func.overloadpacket)
        if operands is not None:
            first, second = operands(args)
            self.flops += 2 * first.numel() * (second.numel() // first.shape[-1])
        return func(*args, **(kwargs or {}))


def _first_two(args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    return args[0], args[1]


def _last_two(args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    return args[1], args[2]


_OPERANDS: dict[Any, Callable[[tuple[Any, ...]], tuple[Tensor, Tensor]]] = {
    _ATEN.mm: _first_two,
    _ATEN.linear: _first_two,
    _ATEN.addmm: _last_two,
    _ATEN.addmm_: _last_two,
}
