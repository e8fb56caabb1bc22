"""The script that checks a GPU, on a CPU and on a tiny scale."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_dry_run_checks_the_kernels_and_replays_until_the_time_is_up(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = ["bash", str(ROOT / "scripts" / "gpu_check.sh"), "--dry-run", "--seconds", "1"]
    done = subprocess.run(
        [*command, "--parts", "correctness", "turns", "--out", str(out)],
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == json.loads(out.read_text(encoding="utf-8"))
    assert len(result["correctness"]) == 12
    assert all(row["right"] for row in result["correctness"])
    turns = result["turns"]
    assert [row["policy"] for row in turns["rows"]] == ["prelrshared"]
    assert turns["rows"][0]["tokens_per_s"] > 0
    assert len(turns["skipped"]) == 9
    assert "are left" in turns["skipped"][0]
    assert turns["backend"] == "triton"
