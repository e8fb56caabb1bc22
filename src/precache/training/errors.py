"""What can go wrong in training that the caller can put right.

PrecacheError
├── TrainingDataError         the trajectories cannot be trained on
├── CheckpointMismatchError   a checkpoint, or a filled folder, is in the way
└── MissingPackageError       the extra `train` is not installed
"""

from __future__ import annotations

from precache.errors import PrecacheError


class TrainingDataError(PrecacheError):
    """The trajectories cannot be trained on: a role or a side of the split is missing."""


class CheckpointMismatchError(PrecacheError):
    """What lies in the output folder does not belong to the run that wants to write there."""


class MissingPackageError(PrecacheError):
    """Training needs a package of the extra `train` that is not installed."""
