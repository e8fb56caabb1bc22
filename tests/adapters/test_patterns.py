"""Regular expressions of a config that would keep `re` busy for ever, and those that `regex` reads differently."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from precache.adapters import load_adapter
from precache.adapters.matching import TARGETS, TargetRule, module_path
from precache.adapters.patterns import PatternMatcher
from precache.errors import AdapterFormatError, UnsupportedAdapterError
from tests.adapters.folders import SHAPE, edit_config, write_adapter

# Exponential in `re` on a module path, and in `regex` too, which sees through simpler ones.
ENDLESS = r"(([a-z]|[a-z_]|[a-z0-9._])+)+[ZQ]"
SEEN_THROUGH = [r"(a+)+$", r"(.+)+$x", r"([a-z_.0-9]+)+!", r"(.*.*.*.*.*.*.*.*)*z"]
PATH = module_path(10, "q_proj")


def load(folder: Path) -> object:
    return load_adapter(folder, SHAPE, dtype=torch.float32, device="cpu")


def test_the_pattern_would_hang_re() -> None:
    code = f"import re; print(1, flush=True); re.match({ENDLESS!r}, {PATH!r})"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it has begun
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        process.kill()


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ENDLESS},
        {"exclude_modules": ENDLESS},
        {"layers_to_transform": [0], "layers_pattern": [ENDLESS]},
        {"rank_pattern": {ENDLESS: 4}},
        {"alpha_pattern": {ENDLESS: 4}},
    ],
    ids=lambda config: next(reversed(config)),
)
def test_an_endless_pattern_is_named(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = edit_config(write_adapter(tmp_path / "a"), **config)
    with pytest.raises(AdapterFormatError) as refused:
        load(folder)
    assert ENDLESS in str(refused.value).replace("\\\\", "\\")
    assert str(folder) in str(refused.value)


def test_many_patterns_share_one_limit() -> None:
    matcher = PatternMatcher("adapter", seconds=0.02)

    def match_often() -> None:
        for _ in range(100_000):  # microseconds each
            matcher.match("q_proj", PATH)

    with pytest.raises(AdapterFormatError, match=r"0\.02 s"):
        match_often()


@pytest.mark.parametrize("pattern", SEEN_THROUGH)
def test_what_regex_sees_through_is_answered(pattern: str) -> None:
    assert TargetRule(pattern).expand(12, TARGETS) == frozenset()


@pytest.mark.filterwarnings("ignore:Possible nested set:FutureWarning")
@pytest.mark.parametrize(
    ("pattern", "path"),
    [("v_proj{e}", "v_proj"), ("(?:q_proj){i<=1}", "q_projx"), ("[[:alpha:]]+", "abc")],
)
def test_what_regex_reads_differently_is_refused(pattern: str, path: str) -> None:
    assert re.fullmatch(pattern, path) is None  # what PEFT would find
    assert PatternMatcher().match(pattern, path, whole=True) is not None
    assert "allowed in a repetition only" in (PatternMatcher().problem(pattern) or "")


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("(", "unterminated"),
        (r"\h", "bad escape"),
        ("((a{100}){100}){100}", "multiply to more than 100"),
        ("((a{100,}){2,})", "multiply to more than 100"),
        ("a" * 1001, "allowed are 1000"),
        ("(" * 500 + ")" * 500, "recursion"),
        (r"layers\.\d{1,2}\..*\{", None),
    ],
)
def test_what_a_pattern_may_hold(pattern: str, problem: str | None) -> None:
    found = PatternMatcher().problem(pattern)
    assert found is None if problem is None else problem in str(found)


def test_a_pattern_of_the_wrong_kind_is_one_of_all_problems(tmp_path: Path) -> None:
    folder = edit_config(
        write_adapter(tmp_path / "a"), rank_pattern={"a{e}": 4, "((a{99}){99})": 4}, use_dora=True
    )
    with pytest.raises(UnsupportedAdapterError) as refused:
        load(folder)
    assert len(refused.value.problems) >= 3
