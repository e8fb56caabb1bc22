"""One tiny model with three strong adapters, and servers over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from precache.engine.policies.profile import RecomputeProfile
from precache.server import ServerSettings
from tests.reference.lora import make_adapter
from tests.reference.models import save_tiny
from tests.server.live import BASE_NAME, LiveServer, load

AGENTS = ("plan", "action", "reflect")
Serve = Callable[..., AbstractContextManager[LiveServer]]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny("llama", tmp_path_factory.mktemp("server") / "model"))


@pytest.fixture(scope="session")
def adapter_root(model: str) -> Path:
    """A folder of adapters: the three agents' and one more."""
    root = Path(model).parent / "adapters"
    for seed, name in enumerate((*AGENTS, "critic"), start=1):
        make_adapter(model, root / name, seed=seed)
    return root


@pytest.fixture(scope="session")
def serve(model: str, adapter_root: Path) -> Serve:
    """Make a server: ``serve(policy=..., settings={...})``."""

    def make(settings: dict[str, Any] | None = None, **options: Any) -> LiveServer:
        adapters = {name: adapter_root / name for name in AGENTS}
        engine = load(model, adapters, **options)
        return LiveServer(engine, ServerSettings(base_name=BASE_NAME, **(settings or {})))

    return make


def relaycaching(folder: Path) -> dict[str, Any]:
    """Options of a server whose readers recompute from the hidden states that the writer kept."""
    profile = folder / "profile.json"
    layers = {"start": 1, "detection": 2, "end": 3}
    RecomputeProfile(4, {"relaycaching": layers}).save(profile)
    return {"policy": "relaycaching", "recompute_share": 0.5, "recompute_profile": profile}


@pytest.fixture(scope="module")
def server(serve: Serve) -> Iterator[LiveServer]:
    with serve() as live:
        yield live


@pytest.fixture(autouse=True)
def _cold(request: pytest.FixtureRequest) -> None:
    """Tests that share a server begin with an empty cache."""
    if "server" in request.fixturenames:
        request.getfixturevalue("server").engine.reset()
