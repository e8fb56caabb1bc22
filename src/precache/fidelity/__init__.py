"""How far a sharing policy moves what agents think of the next token: measured on recorded trajectories.

Importing this package loads no torch.
"""

from __future__ import annotations

from precache.errors import PrecacheError

__all__ = ["FidelityError"]


class FidelityError(PrecacheError):
    """Trajectories, adapters and policies that cannot be compared."""
