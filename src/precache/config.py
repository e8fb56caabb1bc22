"""Settings, read once at the edge and then passed along as frozen data."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from precache.errors import ConfigError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class EngineConfig:
    """How an Engine works.

    ``cache_memory`` is the hard limit of all cached bytes. ``prefill_chunk`` is the largest number of tokens in one
    forward pass, and with it the longest time until a running pass can be interrupted. ``growth_tokens`` is the step in
    which a session's buffers grow; it doubles when they are 64 steps long. ``context_window`` None takes the model's
    own.

    The policies that recompute a part of what others wrote (docs/policies.md) replace at most ``recompute_share`` of
    the k and v of the tokens that are new to a reader, in the layers that ``recompute_profile`` (a JSON file) names
    for them; ``recompute_seed`` draws the random ones. Every reader refreshes a token once, or, with
    ``recompute_again``, again whenever another reader has done so since. ``calibration`` is the file with the
    corrections that ``calibrated`` applies.
    """

    policy: str = "prelrshared"
    schedule: str | None = None
    cache_memory: int = 2 * 2**30
    dtype: str = "auto"
    device: str = "auto"
    prefill_chunk: int = 512
    growth_tokens: int = 256
    context_window: int | None = None
    attention_backend: str = "auto"
    recompute_share: float = 0.3
    recompute_profile: str | Path | None = None
    recompute_seed: int = 0
    recompute_again: bool = False
    calibration: str | Path | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError("dtype", self.dtype, f"one of {list(DTYPES)}")
        for field in ("cache_memory", "prefill_chunk", "growth_tokens"):
            _check_positive(field, getattr(self, field))
        if self.context_window is not None:
            _check_positive("context_window", self.context_window)
        _check_share("recompute_share", self.recompute_share)
        seed = self.recompute_seed
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
            raise ConfigError("recompute_seed", seed, f"an integer from 0 to {2**63 - 1}")


def _check_share(field: str, got: object) -> None:
    if isinstance(got, bool) or not isinstance(got, int | float) or not 0 <= got <= 1:
        raise ConfigError(field, got, "a number from 0 to 1")


def _check_positive(field: str, got: object) -> None:
    if isinstance(got, bool) or not isinstance(got, int) or got < 1:
        raise ConfigError(field, got, "an integer of at least 1")


def parse_size(text: str | int, field: str = "cache_memory") -> int:
    """Bytes from ``"2GiB"``, ``"512 MB"``, ``"1g"`` or a plain number.

    ``KiB``, ``MiB``, ``GiB``, ``TiB`` (and ``Ki`` ...) are powers of 1024, ``KB``, ``K`` ... powers of 1000.
    Raises ConfigError for anything else, and for sizes below one byte.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        _check_positive(field, text)
        return text
    allowed = 'a size such as "2GiB", "512MB" or a number of bytes'
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGTkmgt]?)(i?)[Bb]?\s*", str(text))
    if match is None or (match[3] and not match[2]):
        raise ConfigError(field, text, allowed)
    unit = match[2].upper()
    factor = _BINARY[unit + "i"] if match[3] else _UNITS[unit]
    size = int(float(match[1]) * factor)
    if size < 1:
        raise ConfigError(field, text, allowed)
    return size
