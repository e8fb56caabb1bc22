"""Who may reach a server: its keys and its address, the same rules for the embedded server and for vLLM's.

Owns what a usable key is and how one is compared. Imports no web framework: vLLM's process loads it too.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Iterable

from precache.errors import ConfigError

API_KEY_VARIABLE = "PRECACHE_API_KEY"  # several keys: with commas
OPEN_PATHS = frozenset({"/health"})
KEY_NEEDED = "a valid API key is needed: Authorization: Bearer KEY"
CHALLENGE = {"WWW-Authenticate": "Bearer"}
_MIN_KEY_CHARS = 8


def split_keys(text: str) -> list[str]:
    """The keys of an environment variable's value."""
    return [key for key in text.split(",") if key]


def check_key(field: str, key: str) -> None:
    """Raise ConfigError for a key that is short, or that a header or the variable cannot hold."""
    usable = key.isascii() and key.isprintable() and not set(" ,") & set(key)
    if len(key) < _MIN_KEY_CHARS or not usable:
        raise ConfigError(
            field,
            f"{len(key)} characters",
            f"at least {_MIN_KEY_CHARS} printable ASCII characters without blanks and commas",
        )


def bearer_key(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The bearer key in an ASGI scope's headers, or an empty string. The first Authorization header decides."""
    for name, value in headers:
        if name.lower() == b"authorization":
            scheme, _, key = value.decode("latin-1").partition(" ")
            return key.strip() if scheme.lower() == "bearer" else ""
    return ""


def is_one_of(key: str, allowed: Iterable[str]) -> bool:
    """Compare with every key, each in constant time."""
    given = key.encode()
    return any([hmac.compare_digest(given, each.encode()) for each in allowed])


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server bound to that host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
