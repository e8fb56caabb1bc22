"""Low-rank corrections of what one adapter misses in rows that another one wrote, in a safetensors file.

`precache compare --calibrate` writes it, the policy `calibrated` reads it (docs/policies.md has the format). Owns the
reading: every claim of a file is checked before it is used.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from precache.adapters.spec import ModelShape
from precache.errors import ConfigError

FORMAT = "precache-calibration-1"
MAX_RANK = 256
_MAX_METADATA = 1 << 20
_PLACE = re.compile(r"(p|q_k|q_v)\.(\d+)\.(.+)")


@dataclass(frozen=True, eq=False)
class Calibration:
    """Per layer, for reader j and writer i != j: z = X P is kept of a row that i wrote, and j reads k + RoPE(z Q_k) and
    v + z Q_v. A layer without entries is not corrected.

    ``adapters`` are the digests of the weights that it was fitted to, by name; ``base`` is a writer and no reader.
    """

    rank: int
    model: str  # digest
    adapters: Mapping[str, str]
    p: Mapping[tuple[int, str, str], Tensor]  # (layer, writer, reader) -> [hidden, rank]
    q_k: Mapping[
        tuple[int, str], Tensor
    ]  # (layer, reader) -> [rank, num_kv_heads * head_dim], before RoPE
    q_v: Mapping[tuple[int, str], Tensor]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all that it holds."""
        sha = hashlib.sha256(
            f"{FORMAT} {self.rank} {self.model} {sorted(self.adapters.items())}".encode()
        )
        for name, tensor in sorted(self._tensors().items()):
            sha.update(f"{name}{tuple(tensor.shape)}".encode())
            sha.update(tensor.contiguous().numpy().tobytes())
        return sha.hexdigest()

    def layers(self, reader: str) -> frozenset[int]:
        """The layers in which a reader is corrected."""
        return frozenset(layer for layer, name in self.q_v if name == reader)

    def check(self, shape: ModelShape, where: str) -> None:
        """Raise ConfigError if it does not fit a model of that shape or lacks a part. ``where`` names it."""
        width = shape.num_kv_heads * shape.head_dim
        for (layer, writer, reader), tensor in self.p.items():
            name = f"p.{layer}.{writer}.{reader}"
            self._check_tensor(where, name, tensor, (shape.in_features["v_proj"], self.rank))
            self._check_names(where, name, {reader, *({writer} - {"base"})})
        if set(self.q_k) != set(self.q_v):
            raise _wrong(
                where,
                "q_k and q_v",
                sorted(set(self.q_k) ^ set(self.q_v)),
                "both of a layer and reader",
            )
        for kind, tensors in (("q_k", self.q_k), ("q_v", self.q_v)):
            for (layer, reader), tensor in tensors.items():
                name = f"{kind}.{layer}.{reader}"
                self._check_tensor(where, name, tensor, (self.rank, width))
                self._check_names(where, name, {reader})
                if not 0 <= layer < shape.num_layers:
                    raise _wrong(where, name, layer, f"layers 0 to {shape.num_layers - 1}")
        writers = ("base", *self.adapters)
        needed = {(layer, i, j) for layer, j in self.q_v for i in writers if i != j}
        if set(self.p) != needed:
            raise _wrong(
                where,
                "p",
                sorted(set(self.p) ^ needed)[:3],
                "one of every writer for every corrected layer",
            )

    def _check_tensor(
        self, where: str, name: str, tensor: Tensor, allowed: tuple[int, int]
    ) -> None:
        if tensor.dtype != torch.float32 or tuple(tensor.shape) != allowed:
            raise _wrong(
                where, name, (tensor.dtype, list(tensor.shape)), f"float32 {list(allowed)}"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise _wrong(where, name, "NaN or Inf", "finite values")

    def _check_names(self, where: str, name: str, names: set[str]) -> None:
        if unknown := names - set(self.adapters):
            raise _wrong(where, name, sorted(unknown), f"adapters among {sorted(self.adapters)}")

    def _tensors(self) -> dict[str, Tensor]:
        found = {f"p.{layer}.{i}.{j}": part for (layer, i, j), part in self.p.items()}
        found |= {f"q_k.{layer}.{j}": part for (layer, j), part in self.q_k.items()}
        found |= {f"q_v.{layer}.{j}": part for (layer, j), part in self.q_v.items()}
        return found


def load_calibration(path: str | Path) -> Calibration:
    """Read a calibration. Raises ConfigError, naming what is wrong with the file; whether it fits, ``check`` says."""
    where = str(path)
    try:
        with safe_open(where, framework="pt") as file:
            facts = _facts(where, (file.metadata() or {}).get("precache", ""))
            names = list(file.keys())
            tensors = {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise ConfigError("calibration", where, f"a readable safetensors file ({error})") from error
    p: dict[tuple[int, str, str], Tensor] = {}
    q: dict[str, dict[tuple[int, str], Tensor]] = {"q_k": {}, "q_v": {}}
    agents = ["base", *facts["adapters"]]
    pairs = {f"{i}.{j}": (i, j) for i in agents for j in agents}
    for name, tensor in tensors.items():
        match = _PLACE.fullmatch(name)
        if match is None or (match[1] == "p" and match[3] not in pairs):
            raise _wrong(
                where, "a tensor", name, "p.LAYER.WRITER.READER, q_k.LAYER.READER, q_v.LAYER.READER"
            )
        layer = int(match[2])
        if match[1] == "p":
            p[(layer, *pairs[match[3]])] = tensor
        else:
            q[match[1]][layer, match[3]] = tensor
    return Calibration(facts["rank"], facts["model"], facts["adapters"], p, q["q_k"], q["q_v"])


def _facts(where: str, text: str) -> dict[str, Any]:
    if not text or len(text) > _MAX_METADATA:
        raise _wrong(where, "metadata", f"{len(text)} characters", "a precache calibration's")
    try:
        facts = json.loads(text)
    except ValueError as error:
        raise _wrong(where, "metadata", text[:80], "JSON") from error
    fields = {"format", "policy", "model", "rank", "adapters"}
    if not isinstance(facts, dict) or set(facts) != fields:
        raise _wrong(where, "metadata", text[:80], f"{sorted(fields)}")
    if facts["format"] != FORMAT or facts["policy"] != "calibrated":
        raise _wrong(
            where, "format", (facts["format"], facts["policy"]), f"{(FORMAT, 'calibrated')}"
        )
    if type(facts["rank"]) is not int or not 1 <= facts["rank"] <= MAX_RANK:
        raise _wrong(where, "rank", facts["rank"], f"an integer from 1 to {MAX_RANK}")
    adapters = facts["adapters"]
    if not isinstance(adapters, dict) or not all(
        isinstance(item, str) for item in adapters.values()
    ):
        raise _wrong(where, "adapters", adapters, "digests by name")
    return facts


def _wrong(where: str, what: str, got: object, allowed: str) -> ConfigError:
    return ConfigError(f"calibration {where}: {what}", got, allowed)
