"""Checks that the settings of several benchmarks share. Errors name the option of the command."""

from __future__ import annotations

from collections.abc import Sequence

from precache.bench.adapters import TARGETS
from precache.errors import ConfigError


def require_positive(config: object, *fields: str) -> None:
    """Raise ConfigError unless these integers are 1 or more."""
    for name in fields:
        if getattr(config, name) < 1:
            raise ConfigError(f"--{name}", getattr(config, name), "an integer of at least 1")


def require_agents(agents: Sequence[int]) -> None:
    """Raise ConfigError unless there are numbers of agents, each 1 or more."""
    if not agents or min(agents) < 1:
        raise ConfigError("--agents", list(agents), "integers of at least 1")


def require_targets(targets: str) -> None:
    """Raise ConfigError unless random adapters can have these targets."""
    if targets not in TARGETS:
        raise ConfigError("--targets", targets, f"one of {sorted(TARGETS)}")
