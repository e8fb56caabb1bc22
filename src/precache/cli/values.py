"""Options by name, and their values: comma-separated ones, and those that were given at all."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from precache.errors import ConfigError


def given(args: argparse.Namespace, options: Iterable[str]) -> dict[str, Any]:
    """Those of ``options`` that have a value; those left out, or unknown to the command, are not in it."""
    found = {name: getattr(args, name, None) for name in options}
    return {name: value for name, value in found.items() if value is not None}


def flag(name: str) -> str:
    """The option whose value is under ``name``: ``--first-layer`` for ``first_layer``."""
    return "--" + name.replace("_", "-")


def split_names(text: str) -> list[str]:
    """The names in a comma-separated text, which may be none."""
    return [name.strip() for name in text.split(",") if name.strip()]


def names(option: str, text: str) -> list[str]:
    """At least one name. Raises ConfigError."""
    found = split_names(text)
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
