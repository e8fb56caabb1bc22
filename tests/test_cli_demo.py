"""`precache demo` from end to end, on a tiny model in the place of SmolLM2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from precache import Engine
from precache.cli.demo import POLICIES
from precache.cli.main import main
from precache.cli.options import DEMO_ROLES
from tests.reference.lora import make_adapter
from tests.reference.models import save_tiny


def test_demo_shows_turns_and_compares_policies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_tiny("llama", tmp_path / "model", num_layers=2)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    made = {role: make_adapter(model, tmp_path / role, seed=i) for i, role in enumerate(DEMO_ROLES)}
    load = Engine.load

    def load_tiny(name: str, adapters: dict[str, Path], **settings: Any) -> Engine:
        assert (name, set(adapters)) == ("smollm2", set(made))
        assert all((folder / "adapter_model.safetensors").is_file() for folder in adapters.values())
        return load(str(model), made, **settings)

    monkeypatch.setattr(Engine, "load", load_tiny)
    assert main(["demo", "--dtype", "float32", "--json"]) == 0
    *shown, last = capsys.readouterr().out.splitlines()
    rows = json.loads(last)["rows"]
    assert [row["policy"] for row in rows] == list(POLICIES)
    exact, shared, neutral = rows
    assert (exact["kl"], exact["top1_agreement"]) == (0.0, 1.0)
    assert shared["kl"] > 1e-4
    assert neutral["kl"] > 1e-4
    assert shared["tokens_prefilled"] < exact["tokens_prefilled"]
    assert shared["cache_bytes"] < exact["cache_bytes"]
    assert (shared["neutral_tokens"], neutral["neutral_tokens"] > 0) == (0, True)
    assert sum(line.startswith("== ") for line in shown) == len(POLICIES)
    assert sum(line.startswith("plan ") for line in shown) >= 2 * len(POLICIES)
