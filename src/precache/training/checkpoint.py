"""A training run on disk, without pickle: one safetensors file whose header holds the JSON state.

One file, written beside its place and renamed, so a killed run leaves the last good state.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from precache.training.errors import CheckpointMismatchError

CHECKPOINT_NAME = "checkpoint.safetensors"
_FORMAT = "precache-train-1"


@dataclass(frozen=True, slots=True)
class TrainState:
    """`tensors` are weights and optimiser moments by name; `losses` holds one value per step done.

    `fingerprint` names the recipe, role, model and data that the state belongs to.
    """

    fingerprint: dict[str, Any]
    losses: tuple[float, ...]
    tensors: dict[str, Tensor]

    @property
    def step(self) -> int:
        return len(self.losses)


def save_state(path: Path, state: TrainState) -> None:
    """Write the state atomically; the folder of `path` must exist."""
    header = {
        "format": _FORMAT,
        "fingerprint": json.dumps(state.fingerprint, sort_keys=True),
        "losses": json.dumps(list(state.losses)),
    }
    partial = path.with_suffix(".partial")
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.tensors.items()}
    save_file(tensors, str(partial), metadata=header)
    os.replace(partial, path)


def load_state(path: Path, fingerprint: dict[str, Any]) -> TrainState:
    """Read a state that must belong to `fingerprint`.

    Raises `CheckpointMismatchError` naming the first setting that differs, or saying that the file
    is not a checkpoint.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise CheckpointMismatchError(f"{path} is not a checkpoint: {error}") from error
    if header.get("format") != _FORMAT:
        got = header.get("format")
        raise CheckpointMismatchError(f"{path} has format {got!r}; expected {_FORMAT!r}")
    _require_same(path, json.loads(header["fingerprint"]), fingerprint)
    return TrainState(fingerprint, tuple(json.loads(header["losses"])), tensors)


def _require_same(path: Path, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    for key in sorted(saved.keys() | wanted.keys()):
        if saved.get(key) != wanted.get(key):
            raise CheckpointMismatchError(
                f"{path} was written with {key}={saved.get(key)!r}, this run has "
                f"{key}={wanted.get(key)!r}; resume with the same settings or choose another --out"
            )
