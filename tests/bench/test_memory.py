"""`bench memory` counts what a real cache then holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from precache import Engine
from precache.bench.adapters import agent_names, write_random_adapters
from precache.bench.memory import MemoryConfig, bench_memory
from precache.cli.main import main
from precache.errors import ConfigError, ModelError, UnknownPolicyError
from tests.reference.models import save_tiny

SHARING = ("fullshared", "baseshared", "prelrshared", "rebaseshared")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny("llama", tmp_path_factory.mktemp("memory") / "model", num_layers=2))


@pytest.mark.parametrize("targets", ["qv", "qkvo"])
def test_counts_are_the_bytes_of_a_cache_that_all_agents_have_read(
    model: str, targets: str, tmp_path: Path
):
    policies = ("nonshared", *SHARING)
    config = MemoryConfig(
        (model,), policies, rank=4, targets=targets, dtype="float32", memory="1MiB", length=100
    )
    engine = Engine.load(model, policy="nonshared", dtype="float32")
    folders = write_random_adapters(
        engine.model.shape, agent_names(3), tmp_path, 0, rank=4, targets=targets
    )
    for name, path in folders.items():
        engine.add_adapter(name, path)
    prompt = [5 + index % 50 for index in range(300)]
    for row in bench_memory(config):
        with engine.with_policy(row.policy) as other:
            for agent in agent_names(3):
                other.generate(agent, prompt, max_tokens=1)
            sessions = other.sessions()
            rows = other.store.rounded(len(prompt))
            base = sum(session.base_bytes for session in sessions)
            held = sum(session.bytes for session in sessions)
        assert len(sessions) == (3 if row.policy == "nonshared" else 1)
        assert base == row.base_bytes_per_token * rows
        assert held == row.bytes_per_token * rows
        assert (row.strip_bytes_per_token > 0) == (row.policy in SHARING[1:])


def test_what_fits_is_room_over_bytes(model: str):
    config = MemoryConfig(
        (model,), ("nonshared", "prelrshared", "fullshared"), dtype="float32", memory="1MiB", length=64
    )  # fmt: skip
    nonshared, prelrshared, fullshared = bench_memory(config)
    for row in (nonshared, prelrshared, fullshared):
        assert row.tokens_that_fit == 2**20 // row.bytes_per_token
        assert row.trajectories_that_fit == 2**20 // (64 * row.bytes_per_token)
    one = fullshared.bytes_per_token
    assert nonshared.agents_that_fit == 2**20 // (64 * one)
    strip = prelrshared.strip_bytes_per_token // 3
    assert prelrshared.agents_that_fit == (2**20 // 64 - one) // strip
    assert fullshared.agents_that_fit is None


def test_adapters_with_a_common_a_keep_one_strip(model: str):
    config = MemoryConfig((model,), ("baselrshared", "prelrshared"), agents=(4,))
    common, apart = bench_memory(config)
    assert 4 * common.strip_bytes_per_token == apart.strip_bytes_per_token > 0


def test_eight_billion_parameters_by_hand():
    rows = {row.model: row for row in bench_memory(MemoryConfig(policies=("prelrshared",)))}
    llama = rows["llama-3.1-8b"]
    assert (
        llama.base_bytes_per_token == 2 * 32 * 8 * 128 * 2
    )  # k and v, layers, heads, width, bytes
    assert llama.strip_bytes_per_token == 3 * 32 * 8 * 2  # agents, layers, rank, bytes
    assert rows["qwen3-8b"].base_bytes_per_token == 2 * 36 * 8 * 128 * 2


def test_command(model: str, capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "memory", "--model", f"{model}/config.json", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["policy"] for row in found["rows"]] == found["settings"]["policies"]
    assert main(["bench", "memory", "--model", model, "--agents", "2,4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.endswith("agents")] == [
        f"{model}, 2 agents",
        f"{model}, 4 agents",
    ]


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"models": ("nowhere",)}, ModelError),
        ({"policies": ("none",)}, UnknownPolicyError),
        ({"agents": (0,)}, ConfigError),
        ({"rank": 0}, ConfigError),
        ({"dtype": "int4"}, ConfigError),
        ({"targets": "kv"}, ConfigError),
        ({"memory": "much"}, ConfigError),
    ],
)
def test_what_cannot_be_counted_is_refused(config: dict[str, object], error: type[Exception]):
    with pytest.raises(error, match="got|no such file"):
        bench_memory(MemoryConfig(**config))  # type: ignore[arg-type]
