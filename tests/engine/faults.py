"""Faults to inject: a layer that raises, a head that gives NaN."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from precache import Engine


class Fault(RuntimeError):
    """The injected one."""


@contextmanager
def failing_layer(engine: Engine, call: int, layer: int = 2) -> Iterator[None]:
    """The ``call``-th forward pass from now on raises in the middle: the layers before have written already."""
    engine.stats()  # waits for a pass of the idle worker that is running
    left = [call]

    def count(module: nn.Module, arguments: object) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise Fault

    handle = engine.model.decoder.layers[layer].register_forward_pre_hook(count)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def nan_logits(engine: Engine, call: int) -> Iterator[None]:
    """The ``call``-th logits from now on are NaN."""
    left = [call]

    def spoil(module: nn.Module, arguments: object, logits: Tensor) -> Tensor:
        left[0] -= 1
        return torch.full_like(logits, torch.nan) if left[0] == 0 else logits

    handle = engine.model.head.register_forward_hook(spoil)
    try:
        yield
    finally:
        handle.remove()
