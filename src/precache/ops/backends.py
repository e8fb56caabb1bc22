"""Which attention backends there are, which of them can run where, and which one "auto" takes."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import torch

from precache.ops.contract import (
    AttentionInputs,
    AttentionOutput,
    BackendUnavailableError,
    UnknownBackendError,
)

AUTO = "auto"
_BACKENDS = {
    "reference": "precache.ops.reference",
    "cpu": "precache.ops.cpu",
    "native": "precache.ops.native",
    "triton": "precache.ops.triton",
}
_PORTABLE = "cpu"  # blocked torch, on every device
_FASTEST = {"cuda": "triton", "cpu": "native"}

_logger = logging.getLogger(__name__)


def available_backends() -> tuple[str, ...]:
    """Names that `lora_attention` takes as `backend`, besides "auto"."""
    return tuple(_BACKENDS)


@functools.cache
def choose_backend(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """The backend that `name` stands for on this device, for inputs of this dtype.

    "auto" takes Triton where it can run on a GPU, the native kernel where it can on a CPU, and blocked
    torch elsewhere. Raises UnknownBackendError, and BackendUnavailableError for one that was asked
    for and cannot run.
    """
    if name not in (AUTO, *_BACKENDS):
        raise UnknownBackendError(name, known=[AUTO, *_BACKENDS])
    if name == AUTO:
        chosen, why = _automatic(device, dtype)
        _logger.info("attention backend %r, for %s on %s: %s", chosen, dtype, device, why)
        return chosen
    if (reason := _obstacle(name, device, dtype)) is not None:
        raise BackendUnavailableError(name, reason)
    return name


@functools.cache
def load_backend(
    name: str, device: torch.device, dtype: torch.dtype
) -> Callable[[AttentionInputs], AttentionOutput]:
    """The function of the backend that `name` stands for; imported when it is first used."""
    module = import_module(_BACKENDS[choose_backend(name, device, dtype)])
    attend: Callable[[AttentionInputs], AttentionOutput] = module.attend
    return attend


def _automatic(device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    wanted = _FASTEST.get(device.type)
    if wanted is None:
        return _PORTABLE, "chosen by auto for this kind of device"
    obstacle = _obstacle(wanted, device, dtype)
    if obstacle is None:
        return wanted, "chosen by auto"
    return _PORTABLE, f"chosen by auto, because {wanted} cannot be used: {obstacle}"


def _obstacle(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a backend cannot run there; those that can run everywhere are not asked."""
    if name not in _FASTEST.values():
        return None
    if name == "triton" and find_spec("triton") is None:
        return 'the package is not installed: pip install "precache[triton]"'
    obstacle: str | None = import_module(_BACKENDS[name]).obstacle(device, dtype)
    return obstacle
