"""Tiny random models with three strong adapters. A model is loaded once and shared by the engines of many tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.engine.setup import Setup

SetupOf = Callable[[str], Setup]


@pytest.fixture(scope="session")
def setup_of(tmp_path_factory: pytest.TempPathFactory) -> SetupOf:
    made: dict[str, Setup] = {}

    def get(kind: str) -> Setup:
        if kind not in made:
            made[kind] = Setup(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return get


@pytest.fixture(scope="session")
def llama(setup_of: SetupOf) -> Setup:
    return setup_of("llama")


@pytest.fixture(scope="session")
def qv(llama: Setup) -> Mapping[str, Path]:
    """Folders of the three adapters that most tests use."""
    return llama.adapters("qv")
