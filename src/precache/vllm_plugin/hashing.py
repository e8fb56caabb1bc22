"""Block hashes that carry a cache key of ours in the place of vLLM's LoRA key.

The key enters as the salt of the first block, and every later hash is chained to the one before, so blocks of two keys
never match. vLLM's own functions do the hashing, with their seed, their algorithm and the user's salt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

BlockHasher = Callable[[Any], list[Any]]


class KeyedHasher:
    """A block hasher for requests under one cache key."""

    def __init__(self, stock: BlockHasher, key: str) -> None:
        self.stock = stock
        self.key = key

    def __call__(self, request: Any) -> list[Any]:
        return self.stock(_KeyedView(request, self.key))


class _KeyedView:
    """A request as the hasher is to see it: without its adapter, with our key as the salt."""

    lora_request = None

    def __init__(self, request: Any, key: str) -> None:
        self._request = request
        self.cache_salt = f"precache/{key}/{request.cache_salt or ''}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def set_key(request: Any, stock: BlockHasher, key: str) -> None:
    """Hash a request's tokens anew under a key; nothing happens when it has that key already."""
    hasher = request._block_hasher
    if isinstance(hasher, KeyedHasher) and hasher.key == key:
        return
    request._block_hasher = KeyedHasher(stock, key)
    request.block_hashes = []
    request.update_block_hashes()


def clear_key(request: Any) -> None:
    """Take a request's hashes away until it gets a key; without them it matches and publishes nothing."""
    request._block_hasher = None
    request.block_hashes = []
