"""`calibrated` by its definition (docs/policies.md): PreLRShared, and what a fit adds to k and v in others' rows.

Owns: which rows are corrected for whom, and the sums that are read. The correction is kept in full, as k and v.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from .forward import Network, Pass
from .lora import AdapterDict
from .policies import PreLRShared, Strip


class Calibrated(PreLRShared):
    """For reader j and a row of writer i != j: k + RoPE(X_i P_ij Q_k), v + X_i P_ij Q_v."""

    def __init__(self, network: Network, file: Path) -> None:
        super().__init__(network)
        self.fitted = load_file(file)
        # name -> per layer (k, v) [num_kv_heads, tokens, head_dim] to be added
        self.added: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def set_adapter(self, name: str, adapter: AdapterDict) -> None:
        super().set_adapter(name, adapter)
        empty = torch.empty(self.network.config.num_key_value_heads, 0, self.network.head_dim)
        self.added[name] = [(empty, empty)] * self.network.num_layers

    def write(self, agent: str | None, new_tokens: list[int], start: int, adapted: Pass) -> None:
        for name in self.adapters:
            if self.strip_lens[name] == start:
                self.extend(name, agent, adapted.inputs, start)
        super().write(agent, new_tokens, start, adapted)

    def fill(self, agent: str | None, prefix: list[int]) -> None:
        if agent is not None and self.strip_lens[agent] < len(prefix):
            start = self.strip_lens[agent]
            inputs = [torch.zeros(len(prefix) - start, self.network.config.hidden_size)]
            self.extend(agent, agent, inputs * self.network.num_layers, start)
        super().fill(agent, prefix)

    def extend(self, reader: str, writer: str | None, inputs: list[Tensor], start: int) -> None:
        for layer, x in enumerate(inputs):
            k, v = self.added[reader][layer]
            more_k, more_v = self.correction(reader, writer or "base", layer, x, start)
            self.added[reader][layer] = torch.cat([k, more_k], 1), torch.cat([v, more_v], 1)

    def correction(
        self, reader: str, writer: str, layer: int, x: Tensor, start: int
    ) -> tuple[Tensor, Tensor]:
        heads, dim = self.network.config.num_key_value_heads, self.network.head_dim
        if writer == reader or f"q_k.{layer}.{reader}" not in self.fitted:
            nothing = torch.zeros(heads, len(x), dim)
            return nothing, nothing
        z = x @ self.fitted[f"p.{layer}.{writer}.{reader}"]
        k, v = (
            (z @ self.fitted[f"{q}.{layer}.{reader}"]).view(len(x), heads, dim).transpose(0, 1)
            for q in ("q_k", "q_v")
        )
        return self.network.rope(layer, k, torch.arange(start, start + len(x))), v

    def read(
        self, layer: int, k: Tensor, v_base: Tensor, adapter: AdapterDict, strip: Strip
    ) -> tuple[Tensor, Tensor]:
        k, v = super().read(layer, k, v_base, adapter, strip)
        for name, own in self.adapters.items():
            if own is adapter:
                more_k, more_v = self.added[name][layer]
                length = more_k.shape[1]  # the rows behind are the running pass's own
                k, v = k.clone(), v.clone()
                k[:, :length] += more_k
                v[:, :length] += more_v
        return k, v

    def truncate(self, length: int) -> None:
        super().truncate(length)
        for name, layers in self.added.items():
            self.added[name] = [(k[:, :length], v[:, :length]) for k, v in layers]
