"""The tiny model of the vLLM tests. The settings of a vLLM in this process are made before it is imported."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.reference.lora import ALL_LINEAR, QV, make_adapter, read_adapter
from tests.reference.models import save_tiny
from tests.reference.policies import ReferenceState
from tests.vllm_plugin.engines import SIZES

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

AGENTS = ("plan", "action", "reflect")
ALL_BUT_K = tuple(target for target in ALL_LINEAR if target != "k_proj")
LABELS = {"qv": {"targets": QV}, "all_but_k": {"targets": ALL_BUT_K, "std": 0.05}}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny("llama", tmp_path_factory.mktemp("vllm") / "model", **SIZES))


@pytest.fixture(scope="session")
def adapters(model: str) -> dict[str, dict[str, Path]]:
    """Three adapter folders by agent, by label."""
    return {
        label: {
            agent: make_adapter(model, Path(model).parent / label / agent, seed=seed, **options)
            for seed, agent in enumerate(AGENTS, start=1)
        }
        for label, options in LABELS.items()
    }


@pytest.fixture(scope="session")
def reference(model: str) -> Callable[[str, Mapping[str, Path]], ReferenceState]:
    """Make a reference state of a policy over adapter folders."""
    stock = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )

    def make(policy: str, folders: Mapping[str, Path]) -> ReferenceState:
        read = {name: read_adapter(path) for name, path in folders.items()}
        return ReferenceState(stock, read, policy)

    return make
