"""The settings of a training run: one frozen dataclass that is checked before any work is done."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from precache.errors import ConfigError
from precache.tasks import ROLES, TASKS

TARGETS: dict[str, list[str] | str] = {
    "qv": ["q_proj", "v_proj"],
    "qkvo": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "all-linear": "all-linear",
}
DTYPES = ("float32", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")


_LOWEST_INTEGERS = {
    "rank": 1,
    "alpha": 1,
    "steps": 1,
    "batch": 1,
    "warmup_steps": 0,
    "max_tokens": 16,
    "seed": 0,
}


def _require_integer(name: str, value: object, lowest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise ConfigError(name, value, f"an integer of at least {lowest}")


def _require_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(name, value, "one of " + ", ".join(allowed))


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides the trained weights, apart from the data and the base model.

    `batch` is in trajectories, `max_tokens` is per trajectory, `lr` is the peak learning rate.
    """

    rank: int = 8
    alpha: int = 16
    targets: str = "qv"
    steps: int = 50
    batch: int = 3
    lr: float = 1e-3
    warmup_steps: int = 5
    max_tokens: int = 1024
    seed: int = 0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name, lowest in _LOWEST_INTEGERS.items():
            _require_integer(name, getattr(self, name), lowest)
        _require_choice("targets", self.targets, tuple(TARGETS))
        _require_choice("dtype", self.dtype, DTYPES)
        if not 0.0 < self.lr <= 1.0:
            raise ConfigError("lr", self.lr, "more than 0 and at most 1")

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as plain JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """One `precache train` run: which roles, from where, to where, by which recipe.

    `data` is a folder with `{task}_episodes.jsonl`, or a JSONL file of our own trajectories
    (see `precache.tasks.read_trajectories`); such a file brings its own role names.
    `heldout_episodes` bounds the evaluation, `save_every` is in optimiser steps.
    """

    data: Path
    out: Path
    task: str = "scienceqa"
    roles: tuple[str, ...] = ROLES
    model: str = "smollm2"
    recipe: Recipe = field(default_factory=Recipe)
    heldout_episodes: int = 12
    save_every: int = 10
    resume: bool = False
    device: str = "auto"

    def __post_init__(self) -> None:
        _require_choice("task", self.task, tuple(TASKS))
        _require_choice("device", self.device, DEVICES)
        _require_integer("heldout_episodes", self.heldout_episodes, 1)
        _require_integer("save_every", self.save_every, 1)
        self._check_paths()
        self._check_roles()

    def _check_paths(self) -> None:
        if not self.data.exists():
            raise ConfigError("data", str(self.data), "a folder or file that exists")
        if self.out.exists() and not self.out.is_dir():
            raise ConfigError("out", str(self.out), "a folder, or a path that does not exist yet")

    def _check_roles(self) -> None:
        if not self.roles:
            raise ConfigError("roles", list(self.roles), "at least one role")
        if len(set(self.roles)) != len(self.roles):
            raise ConfigError("roles", list(self.roles), "each role at most once")
        if self.data.is_dir():
            for role in self.roles:
                _require_choice("role", role, ROLES)
