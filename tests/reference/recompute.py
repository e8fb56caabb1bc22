"""The selective-recompute methods by definition (docs/policies.md): one full cache, readers overwrite parts of it.

Owns: which tokens a reader refreshes, in which layers, and which rows are chosen. Every step is one call over all rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .forward import Network
from .lora import AdapterDict
from .policies import FullShared


class Recompute(FullShared):
    """FullShared, but before its turn a reader replaces k and v of a part of what it has not been over."""

    def __init__(
        self,
        network: Network,
        share: float = 0.3,
        again: bool = False,
        layers: Sequence[int] | None = None,
        span: tuple[int, int, int] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(network)
        self.share = share
        self.again = again
        self.layers = layers  # of droidspeak
        self.span = span  # start, detection and end of relaycaching
        self.seed = seed
        self.been_over: list[set[str | None]] = []  # per token, whose passes
        self.hidden: list[Tensor] = []  # per layer, what entered it when the token was first run

    def turn(self, agent: str | None, prefix: list[int], new_tokens: list[int]) -> Tensor:
        self.fill(agent, prefix)
        network, adapter, start = self.network, self.adapter_of(agent), len(prefix)

        def context(layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
            k = torch.cat([self.k[layer], network.keys(layer, x, start, adapter)], dim=1)
            v = torch.cat([self.v[layer], network.values(layer, x, adapter)], dim=1)
            return k, v

        result = network.run(new_tokens, start, adapter, context)
        for layer, x in enumerate(result.inputs):
            self.k[layer], self.v[layer] = context(layer, x)
        old = self.hidden or [hidden[:0] for hidden in result.hidden]
        self.hidden = [torch.cat(pair) for pair in zip(old, result.hidden, strict=True)]
        self.been_over += [{agent} for _ in new_tokens]
        return result.logits

    @torch.no_grad()
    def fill(self, agent: str | None, prefix: list[int]) -> None:
        """Refresh the tokens of the prefix that the agent's passes have not been over."""
        rows = [t for t in range(len(prefix)) if agent not in self.been_over[t]]
        if not rows or not self.refresh(agent, prefix, torch.tensor(rows)):
            return
        for t in rows:
            self.been_over[t] = {agent} if self.again else self.been_over[t] | {agent}

    def refresh(self, agent: str | None, prefix: list[int], rows: Tensor) -> bool:
        """Replace k and v; False if the share allows nothing."""
        raise NotImplementedError

    def truncate(self, length: int) -> None:
        super().truncate(length)
        self.hidden = [hidden[:length] for hidden in self.hidden]
        self.been_over = self.been_over[:length]

    def first_touched(self, name: str, writers: Sequence[str | None]) -> int | None:
        """The first token of whose k and v an agent's pass may have written any."""
        return next((t for t, agents in enumerate(self.been_over) if name in agents), None)

    # --- steps ------------------------------------------------------------------------------------

    def entering(self, first: int, prefix: list[int], rows: Tensor) -> Tensor:
        if first == 0:
            return self.network.embed([prefix[t] for t in rows.tolist()])
        return self.hidden[first][rows]

    def replace(self, layer: int, h: Tensor, rows: Tensor, adapter: AdapterDict) -> None:
        x = self.network.layer_input(layer, h)
        self.k[layer], self.v[layer] = self.k[layer].clone(), self.v[layer].clone()
        self.k[layer][:, rows] = self.network.keys_at(layer, x, rows, adapter)
        self.v[layer][:, rows] = self.network.values(layer, x, adapter)

    def through(self, layer: int, h: Tensor, rows: Tensor, adapter: AdapterDict) -> Tensor:
        return self.network.layer_output(layer, h, rows, adapter, self.k[layer], self.v[layer])

    def deviation(
        self, layer: int, h: Tensor, rows: Tensor, adapter: AdapterDict
    ) -> tuple[Tensor, Tensor]:
        """(own values, cached values) [rows, kv width]."""
        own = self.network.values(layer, self.network.layer_input(layer, h), adapter)
        return own.transpose(0, 1).flatten(1), self.v[layer][:, rows].transpose(0, 1).flatten(1)


def floor(number: float) -> int:
    return math.floor(number + 1e-6)


class DroidSpeak(Recompute):
    """Chosen layers, all rows. Hidden states run through every layer between the first and the last of them."""

    def chosen(self) -> list[int]:
        if self.layers is not None:
            return list(self.layers)
        return list(range(floor(self.share * self.network.num_layers)))

    def refresh(self, agent: str | None, prefix: list[int], rows: Tensor) -> bool:
        chosen = self.chosen() if self.share else []
        if not chosen:
            return False
        adapter = self.adapter_of(agent)
        h = self.entering(min(chosen), prefix, rows)
        for layer in range(min(chosen), max(chosen) + 1):
            if layer in chosen:
                self.replace(layer, h, rows, adapter)
            h = self.through(layer, h, rows, adapter)
        return True


class CacheBlend(Recompute):
    """Layer 0 for all rows; from layer 1 on the rows whose values are furthest from the cached ones there."""

    def refresh(self, agent: str | None, prefix: list[int], rows: Tensor) -> bool:
        num_layers, adapter = self.network.num_layers, self.adapter_of(agent)
        entries = self.share * num_layers * len(rows)  # (token, layer) pairs that may be replaced
        if entries <= len(rows):
            return False
        count = floor((entries - len(rows)) / (num_layers - 1))
        h = self.entering(0, prefix, rows)
        self.replace(0, h, rows, adapter)
        h = self.through(0, h, rows, adapter)
        best = self.scores(h, rows, adapter).argsort(descending=True)[:count].sort().values
        rows, h = rows[best], h[best]
        for layer in range(1, num_layers if count else 1):
            self.replace(layer, h, rows, adapter)
            h = self.through(layer, h, rows, adapter)
        return True

    def scores(self, h: Tensor, rows: Tensor, adapter: AdapterDict) -> Tensor:
        own, cached = self.deviation(1, h, rows, adapter)
        return ((own - cached) ** 2).sum(dim=1)


class RandomTokens(CacheBlend):
    """The score of a position is its place in a seeded sequence of random numbers."""

    def scores(self, h: Tensor, rows: Tensor, adapter: AdapterDict) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.rand(int(rows.max()) + 1, generator=generator)[rows]


class RelayCaching(Recompute):
    """start..detection for all rows, detection..end for those that deviate or are looked at."""

    def refresh(self, agent: str | None, prefix: list[int], rows: Tensor) -> bool:
        start, detection, end = self.range()
        if self.share == 0 or self.share * self.network.num_layers <= detection - start:
            return False
        adapter = self.adapter_of(agent)
        h, suffix = self.entering(start, prefix, rows), rows[-10:]
        looked_at = torch.zeros(len(prefix))
        for layer in range(start, detection):
            self.replace(layer, h, rows, adapter)
            seen = self.network.attention_weights(layer, h[-10:], suffix, adapter, self.k[layer])
            looked_at += seen.sum(dim=(0, 1))
            h = self.through(layer, h, rows, adapter)
        own, cached = self.deviation(detection, h, rows, adapter)
        cosine = (own * cached).sum(1) / (own.norm(dim=1) * cached.norm(dim=1))
        deviates, attended = 1 - cosine, looked_at[rows]
        factor = torch.maximum(
            deviates / (1.5 * deviates.mean()), attended / (1.45 * attended.mean())
        )
        entries = (self.share * self.network.num_layers - (detection - start)) * len(rows)
        count = min(len(rows), floor(entries / (end - detection + 1)))
        best = factor.argsort(descending=True)[:count].sort().values
        rows, h = rows[best], h[best]
        for layer in range(detection, end + 1 if count else detection):
            self.replace(layer, h, rows, adapter)
            h = self.through(layer, h, rows, adapter)
        return True

    def range(self) -> tuple[int, int, int]:
        if self.span is not None:
            return self.span
        margin = floor(self.network.num_layers * (1 - self.share) / 3)
        return margin, margin + 1, self.network.num_layers - 1 - margin


class RandomLayers(DroidSpeak):
    """Layers drawn by a seed."""

    def chosen(self) -> list[int]:
        count = floor(self.share * self.network.num_layers)
        generator = torch.Generator().manual_seed(self.seed)
        return sorted(torch.randperm(self.network.num_layers, generator=generator)[:count].tolist())


RECOMPUTE = {
    "droidspeak": DroidSpeak,
    "droidspeak-scattered": DroidSpeak,
    "cacheblend": CacheBlend,
    "relaycaching": RelayCaching,
    "random-layers": RandomLayers,
    "random-tokens": RandomTokens,
}
