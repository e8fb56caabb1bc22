"""What this machine can do at most, measured: a large matrix product and a large copy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from precache.bench.attention.timing import seconds_per_call

_SMALLEST_SIDE = 256
_LARGEST_SIDE = {"cpu": 2048, "cuda": 8192}
_LONGEST_PRODUCT_S = 0.5
_COPY_BYTES = {"cpu": 2**27, "cuda": 2**31}
_REPEATS = 5


@dataclass(frozen=True)
class Ceilings:
    """Best of a few repeats. ``bytes_per_s`` counts a copy's reads and writes together."""

    operations_per_s: float
    bytes_per_s: float


def measure_ceilings(dtype: torch.dtype, device: torch.device) -> Ceilings:
    """A square product in this dtype, of half a second at most, and a copy of 128 MiB (2 GiB on a GPU)."""
    num_bytes = _COPY_BYTES[device.type]
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    copy_s = _best(lambda: target.copy_(source), device)
    return Ceilings(_operations_per_s(dtype, device), 2 * num_bytes / copy_s)


def _operations_per_s(dtype: torch.dtype, device: torch.device) -> float:
    side = _SMALLEST_SIDE
    while True:
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        product = torch.empty_like(a)
        gemm_s = _best(functools.partial(torch.mm, a, b, out=product), device)
        if side == _LARGEST_SIDE[device.type] or 8 * gemm_s > _LONGEST_PRODUCT_S:
            return 2 * side**3 / gemm_s
        side *= 2


def _best(call: Callable[[], object], device: torch.device) -> float:
    call()
    return min(seconds_per_call(call, 1, device).wall_s for _ in range(_REPEATS))
