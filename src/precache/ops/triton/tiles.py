"""How the Triton backend cuts one call: tile sizes, warps, and how often the keys are split.

The sizes fit the 99 KiB of shared memory of the smaller GPUs that are supported (compute capability
8.6 and 8.9). They were chosen by what the compiler reports, not by measurements on a GPU.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

_WIDE, _WIDEST = 200, 512
_MIN_KEYS_PER_SPLIT = 256
_MAX_SPLITS = 64
_PROGRAMS_PER_PROCESSOR = 2


@dataclass(frozen=True, slots=True)
class Tiles:
    """Any choice gives the same result, up to rounding."""

    block_m: int  # rows, which are (query, head of the group) pairs; a power of 2, 16 or more
    block_n: int  # keys; a power of 2, 16 or more
    num_warps: int
    num_stages: int
    num_splits: int | None = None  # None: as many as keep the processors busy


def tiles_for(rows: int, width: int, dtype: torch.dtype, has_key_strip: bool) -> Tiles:
    """`rows` is the most that a sequence has for one KV head, `width` that of both accumulators."""
    if width > _WIDEST:
        return Tiles(16, 16, 8, 1)
    wide = width > _WIDE
    few = rows <= 16
    if dtype == torch.float32 or has_key_strip:
        return Tiles(16, 16, 8, 1) if wide else Tiles(16 if few else 32, 32, 8, 2)
    if few:
        return Tiles(16, 32 if wide else 64, 4, 2 if wide else 3)
    if wide:
        return Tiles(64, 32, 8, 2)
    return Tiles(64, 64, 4, 2) if rows <= 64 else Tiles(128, 64, 8, 2)


def splits_for(programs: int, max_keys: int, device: torch.device) -> int:
    """Into how many parts the keys go, when `programs` would run without splitting."""
    wanted = _PROGRAMS_PER_PROCESSOR * _processors(device) // programs
    most = min(max_keys // _MIN_KEYS_PER_SPLIT, _MAX_SPLITS)
    # A power of 2, because each number of splits is compiled anew.
    return 1 << max(min(wanted, most), 1).bit_length() - 1


@functools.cache
def _processors(device: torch.device) -> int:
    """Streaming multiprocessors; 1 where Triton interprets on a CPU."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
