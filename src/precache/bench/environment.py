"""What a figure depends on besides the code: machine, versions, threads, and the command."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("precache", "torch", "transformers", "peft", "numpy")


def environment() -> dict[str, Any]:
    """Plain JSON values for a result file."""
    return {
        "command": shlex.join(["precache", *sys.argv[1:]]),
        "commit": _commit(),
        "machine": _machine(),
        "versions": {"python": platform.python_version(), **_versions()},
        "settings": {
            "torch_threads": torch.get_num_threads(),
            "load_average": os.getloadavg() if hasattr(os, "getloadavg") else None,
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY"),
        },
    }


def _versions() -> dict[str, str | None]:
    return {name: _version(name) for name in _PACKAGES}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _machine() -> dict[str, Any]:
    return {
        "system": platform.platform(),
        "cpu": _cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of a source checkout, "-dirty" behind it if files differ; None for an installed package."""
    git = [
        "git",
        "-C",
        str(Path(__file__).parent),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=12",
    ]
    try:
        done = subprocess.run(git, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
