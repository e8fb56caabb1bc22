"""What a policy had to run, counted: floating-point operations, and rows through decoder layers. No clock here.

The engine counts its products (`CacheStats`); rows are counted here, at the door of every layer.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Self

from torch import Tensor, nn

from precache import Engine


@dataclass(frozen=True)
class Cost:
    """Sums over passes: ``layer_rows`` are rows through decoder layers, ``refreshed`` rows of cached k and v replaced.

    ``cache_bytes`` is what is cached at the end.
    """

    layer_rows: int = 0
    flops: int = 0
    refreshed: int = 0
    cache_bytes: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.layer_rows + other.layer_rows,
            self.flops + other.flops,
            self.refreshed + other.refreshed,
            self.cache_bytes + other.cache_bytes,
        )


class CostMeter:
    """Counts what one engine runs while it is open."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before = engine.stats()
        self._open = ExitStack()
        self._layer_rows = 0

    def __enter__(self) -> Self:
        for layer in self._engine.model.decoder.layers:
            handle = layer.register_forward_pre_hook(self._see)
            self._open.callback(handle.remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def cost(self) -> Cost:
        """What was run so far, and what is cached now."""
        now, before = self._engine.stats(), self._before
        return Cost(
            self._layer_rows,
            now.flops - before.flops,
            now.refreshed_kv_entries - before.refreshed_kv_entries,
            now.bytes_held,
        )

    def _see(self, layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._layer_rows += args[0].shape[1]
