"""What one attention layer knows of its strips, under every backend."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from precache.errors import UnsupportedModelError
from precache.vllm_plugin.strips import (
    StripStep,
    move_strips,
    strip_rows,
    strip_view,
    strip_width,
    write_strips,
)


class StripLayer:
    """Comes before vLLM's attention implementation among the bases; that one says what is declared here."""

    alibi_slopes: Any
    sinks: Any
    head_size: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.alibi_slopes is not None or self.sinks is not None:
            raise UnsupportedModelError("attention with ALiBi or sinks cannot read strips")
        self.projection: Any = None  # a StripProjection
        self.step = StripStep()

    def use_strips_of(self, projection: Any) -> None:
        """Attend with the values of this projection's adapters."""
        self.projection = projection
        self.width = strip_width(projection.num_slots, projection.lora_rank, self.head_size)

    def strips_in(self, kv_cache: Tensor) -> Tensor:
        """The strip rows of the layer's cache, [num_blocks, block_size, width]."""
        return strip_view(kv_cache, self.width)

    def store_strips(self, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """Store the strips of the step's rows, and apply its moves."""
        strips = self.strips_in(kv_cache)
        if self.step.where is None:
            self.step.where = strip_rows(slot_mapping, strips.shape[1])
        write_strips(strips, self.projection.new_strips, self.step.where)
        for moves in self.step.moves:
            move_strips(strips, moves, self.projection.lora_rank)
