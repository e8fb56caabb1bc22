"""Compiles the kernels with the machine's C compiler: when precache is installed, or by python -m precache.ops.native.

The build hook of the package runs this file before precache can be imported, so it imports nothing of it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = (HERE / "decode.c", HERE / "prefill.c")
HEADER = HERE / "common.h"
LIBRARY = HERE / "kernels.so"
# Sums may be contracted (fused multiply-add) but not reordered, and NaN and infinities keep their meaning.
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math")
THREADS = "-fopenmp"
TIMEOUT_S = 120


class BuildError(Exception):
    """The kernels were not compiled; precache works without them, and more slowly on a CPU."""


def source_id() -> int:
    """Of the sources and how they are compiled: the library carries it, so that an older one is noticed."""
    digest = hashlib.sha256(repr((FLAGS, THREADS)).encode())
    for path in (HEADER, *SOURCES):
        digest.update(path.read_bytes())
    return int.from_bytes(digest.digest()[:8], "big")


def build(library: Path = LIBRARY) -> Path:
    """Compile the sources into ``library`` and return it. Raises BuildError; an older library then stays as it is."""
    if platform.system() not in ("Linux", "Darwin"):
        raise BuildError(f"system: got {platform.system()}, allowed are Linux and Darwin")
    name, *own_flags = shlex.split(os.environ.get("CC", "")) or ["cc"]  # CC may be "ccache gcc"
    compiler = shutil.which(name)
    if compiler is None:
        raise BuildError(f"no C compiler: got {name!r} (set CC)")
    # Apple's compiler has no OpenMP; one thread is what a decode step takes there.
    threads = () if platform.system() == "Darwin" else (THREADS,)
    # Under another name first: whoever has the old one open keeps it, and no half of one is ever loaded.
    unfinished = library.with_suffix(f".{os.getpid()}.tmp")
    flags = [*own_flags, *FLAGS, *threads, f"-DSOURCE_ID=0x{source_id():x}ULL"]
    command = [compiler, *flags, *map(str, SOURCES), "-o", str(unfinished), "-lm"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        if done.returncode != 0:
            raise BuildError(
                f"{' '.join(command)}: status {done.returncode}\n{done.stderr[-2000:]}"
            )
        unfinished.replace(library)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{' '.join(command)}: {error}") from error
    finally:
        unfinished.unlink(missing_ok=True)
    return library
