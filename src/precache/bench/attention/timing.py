"""The clock of `bench attention`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch


class Sample(NamedTuple):
    """Seconds of one call: on the wall, and of the processor (all threads; the host's alone with a GPU)."""

    wall_s: float
    cpu_s: float


def seconds_per_call(call: Callable[[], object], calls: int, device: torch.device) -> Sample:
    """Run it ``calls`` times and return the mean."""
    _wait_for(device)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(calls):
        call()
    _wait_for(device)
    return Sample((time.perf_counter() - wall) / calls, (time.process_time() - cpu) / calls)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
