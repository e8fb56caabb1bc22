"""What passes cost, by count: no clock, the same on every machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Work:
    """Sums over passes.

    ``flops``: two for every multiply-add of the products that were run (projections, low-rank parts, attention over
    the keys that a row sees, head; norms and activations are not counted). ``token_layers``: rows times the decoder
    layers that they went through. ``kv_entries``: rows times the layers whose k and v were stored.
    """

    flops: int = 0
    token_layers: int = 0
    kv_entries: int = 0

    def add(self, other: Work) -> None:
        self.flops += other.flops
        self.token_layers += other.token_layers
        self.kv_entries += other.kv_entries

    def add_product(self, rows: int, width_in: int, width_out: int) -> None:
        """A product of [rows, width_in] and [width_in, width_out]."""
        self.flops += 2 * rows * width_in * width_out
