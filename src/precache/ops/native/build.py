"""Compiles the kernel with the machine's C compiler: when precache is installed, or by `python -m precache.ops.native`.

The build hook of the package runs this file before precache can be imported, so it imports nothing of it.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
SOURCE = HERE / "decode.c"
LIBRARY = HERE / "decode.so"
# Sums may be contracted (fused multiply-add) but not reordered, and NaN and infinities keep their meaning.
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math")
THREADS = "-fopenmp"
TIMEOUT_S = 120


class BuildError(Exception):
    """The kernel was not compiled; precache works without it, and decodes more slowly on a CPU."""


def build(library: Path = LIBRARY) -> Path:
    """Compile ``decode.c`` into ``library`` and return it. Raises BuildError; an older library is gone then."""
    library.unlink(missing_ok=True)
    if platform.system() not in ("Linux", "Darwin"):
        raise BuildError(f"system: got {platform.system()}, allowed are Linux and Darwin")
    name = os.environ.get("CC", "cc")
    compiler = shutil.which(name)
    if compiler is None:
        raise BuildError(f"no C compiler: got {name!r} (set CC)")
    # Apple's compiler has no OpenMP; one thread is what a decode step takes there.
    threads = () if platform.system() == "Darwin" else (THREADS,)
    # Under another name first: whoever has the old one open keeps it, and no half of one is ever loaded.
    unfinished = library.with_suffix(f".{os.getpid()}.tmp")
    command = [compiler, *FLAGS, *threads, str(SOURCE), "-o", str(unfinished), "-lm"]
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
