"""The kernels compile to machine code, without a GPU, and fit its shared memory; on this CPU the backend is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

ROOT = Path(__file__).parents[2]
SHARED_MEMORY = (
    99 * 1024
)  # of a block on compute capability 8.6 and 8.9, the least of those supported


@pytest.mark.slow
def test_kernels_compile_for_a_gpu_and_fit_its_shared_memory(tmp_path: Path) -> None:
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    done = subprocess.run(
        [sys.executable, "-m", "tests.ops.compile_kernels", "80"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert len(report["shared"]) == 3
    assert max(report["shared"].values()) <= SHARED_MEMORY
    assert "'triton' cannot be used: it needs a GPU, not 'cpu'" in report["refusal"]
