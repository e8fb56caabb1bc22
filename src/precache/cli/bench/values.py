"""Comma-separated values of options."""

from __future__ import annotations

from precache.errors import ConfigError


def names(option: str, text: str) -> list[str]:
    """At least one name. Raises ConfigError."""
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise ConfigError(option, text, "comma-separated names")
    return found


def integers(option: str, text: str) -> tuple[int, ...]:
    """Integers of any size. Raises ConfigError."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(option, text, "comma-separated integers, such as 256,2048") from None


def numbers(option: str, text: str) -> tuple[float, ...]:
    """Numbers of any size. Raises ConfigError."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(option, text, "comma-separated numbers, such as 1,0.5") from None
