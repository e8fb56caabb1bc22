"""Tiny random models with three strong adapters, loaded the way a user loads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from precache import Engine
from reference.lora import make_adapter
from reference.models import save_tiny

AGENTS = ("plan", "action", "reflect")


class Setup:
    """A model folder, and adapter folders that are made when asked for."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.folder = folder
        self.model = str(save_tiny(kind, folder / "model"))
        self._made: dict[str, dict[str, Path]] = {}

    def adapters(self, label: str = "qv", **options: object) -> dict[str, Path]:
        """Three adapter folders of one kind; ``options`` are those of ``make_adapter``."""
        if label not in self._made:
            root = self.folder / label
            self._made[label] = {
                name: make_adapter(self.model, root / name, seed=seed, **options)  # type: ignore[arg-type]
                for seed, name in enumerate(AGENTS, start=1)
            }
        return self._made[label]

    def engine(self, policy: str, adapters: dict[str, Path] | None = None, **settings: object) -> Engine:
        chosen = self.adapters() if adapters is None else adapters
        settings.setdefault("dtype", "float32")
        return Engine.load(self.model, adapters=chosen, policy=policy, **settings)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def setup_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Setup]:
    made: dict[str, Setup] = {}

    def get(kind: str) -> Setup:
        if kind not in made:
            made[kind] = Setup(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return get


@pytest.fixture(scope="session")
def llama(setup_of: Callable[[str], Setup]) -> Setup:
    return setup_of("llama")
