"""Training of role adapters: PEFT LoRA on trajectories. Importing this package loads no torch."""

from __future__ import annotations

from precache.training.errors import (
    CheckpointMismatchError,
    MissingPackageError,
    TrainingDataError,
)
from precache.training.recipe import Recipe, TrainConfig

__all__ = [
    "CheckpointMismatchError",
    "MissingPackageError",
    "Recipe",
    "TrainConfig",
    "TrainingDataError",
]
