"""BaseLRShared (LRAgent, arXiv 2602.01053): PreLRShared for agents that were trained with one common A."""

from __future__ import annotations

from collections.abc import Sequence

from precache.adapters.bank import Adapter
from precache.adapters.verdicts import describe_a_difference, first_a_difference
from precache.engine.policies.prelrshared import PreLRShared
from precache.errors import PolicyNotAllowedError


class BaseLRShared(PreLRShared):
    """One base and one strip for all. Equal A matrices share a strip by themselves; here they are required."""

    name = "baselrshared"

    def check(self, adapters: Sequence[Adapter]) -> None:
        """Raise PolicyNotAllowedError naming the first layer whose A differs between two adapters."""
        difference = first_a_difference(adapters)
        if difference is not None:
            raise PolicyNotAllowedError(
                self.name, f"{describe_a_difference(difference)}; prelrshared needs no common A"
            )
