"""`bench memory`: bytes of a cached token by part, and what fits into a given memory. By count: nothing is loaded.

The counts come from the policies themselves, asked about adapters that have shapes and no values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from precache.adapters.bank import Adapter, AdapterBank
from precache.adapters.spec import ModelShape
from precache.adapters.verdicts import COMMON_A
from precache.adapters.weights import LoraModule, LoraWeights
from precache.bench.adapters import LORA_RANK, TARGETS, agent_names
from precache.bench.checks import require_agents, require_positive, require_targets
from precache.bench.shapes import model_config
from precache.cache.layout import CacheLayout
from precache.config import parse_size
from precache.engine.model import NAMED_DTYPES, model_shape_from_config
from precache.engine.policies import make_policy
from precache.errors import ConfigError


@dataclass(frozen=True)
class MemoryConfig:
    """What to count. ``memory`` is room for the cache alone; ``length`` is that of one trajectory, in tokens."""

    models: tuple[str, ...] = ("llama-3.1-8b", "ministral-8b", "qwen3-8b")
    policies: tuple[str, ...] = ("nonshared", "fullshared", "prelrshared", "rebaseshared")
    agents: tuple[int, ...] = (3,)
    rank: int = LORA_RANK
    targets: str = "qv"
    dtype: str = "bfloat16"
    memory: str | int = "16GiB"
    length: int = 65_536

    def __post_init__(self) -> None:
        require_agents(self.agents)
        require_positive(self, "rank", "length")
        require_targets(self.targets)
        if self.dtype not in NAMED_DTYPES:
            raise ConfigError("--dtype", self.dtype, f"one of {sorted(NAMED_DTYPES)}")
        for policy in self.policies:
            make_policy(policy)
        parse_size(self.memory, "--memory")


@dataclass(frozen=True)
class MemoryRow:
    """One policy on one model: bytes a token, and what fits. ``trajectories_that_fit`` are ``length`` tokens long.

    ``agents_that_fit`` is how many agents could share (or, with nonshared, have) one such trajectory; None: any number.
    Buffers that grow in steps, and the private copy of double batching while a turn runs, come on top.
    """

    model: str
    policy: str
    agents: int
    base_bytes_per_token: int
    strip_bytes_per_token: int
    bytes_per_token: int
    tokens_that_fit: int
    trajectories_that_fit: int
    agents_that_fit: int | None


def bench_memory(config: MemoryConfig) -> list[MemoryRow]:
    """Count. Raises ModelError and UnsupportedModelError."""
    shapes = {name: model_shape_from_config(model_config(name)) for name in config.models}
    return [
        _row(config, name, shape, policy, agents)
        for name, shape in shapes.items()
        for agents in config.agents
        for policy in config.policies
    ]


def _row(
    config: MemoryConfig, model: str, shape: ModelShape, policy: str, agents: int
) -> MemoryRow:
    base, strips = bytes_per_token(config, shape, policy, agents)
    first, second = (sum(bytes_per_token(config, shape, policy, n)) for n in (1, 2))
    room = parse_size(config.memory, "--memory")
    # Bytes are linear in the number of agents.
    fixed, each = 2 * first - second, second - first
    return MemoryRow(
        model=model,
        policy=policy,
        agents=agents,
        base_bytes_per_token=base,
        strip_bytes_per_token=strips,
        bytes_per_token=base + strips,
        tokens_that_fit=room // (base + strips),
        trajectories_that_fit=room // ((base + strips) * config.length),
        agents_that_fit=max(0, room // config.length - fixed) // each if each else None,
    )


def bytes_per_token(
    config: MemoryConfig, shape: ModelShape, policy: str, agents: int
) -> tuple[int, int]:
    """Bytes of k and v, and of all that is kept beside them, for a token that all agents have read."""
    dtype = NAMED_DTYPES[config.dtype]
    bank = AdapterBank(shape, dtype=dtype, device="meta")
    bank.take(planned_adapters(shape, config, agents, common_a=policy == COMMON_A))
    method = make_policy(policy)
    layout = CacheLayout(
        shape.num_layers, shape.num_kv_heads, shape.head_dim, dtype, torch.device("meta")
    )
    caches = {method.namespace(adapter) for adapter in bank}
    strips = sum(write.layout.numbers_per_token for write in method.strips(bank))
    return len(caches) * layout.base_bytes_per_token, strips * dtype.itemsize


def planned_adapters(
    shape: ModelShape, config: MemoryConfig, agents: int, *, common_a: bool
) -> Sequence[Adapter]:
    """Adapters without values. With ``common_a`` they count as trained with equal A matrices."""
    modules = {
        (layer, target): LoraModule(
            torch.empty(config.rank, shape.in_features[target], device="meta"),
            torch.empty(shape.out_features[target], config.rank, device="meta"),
            scaling=1.0,
        )
        for layer in range(shape.num_layers)
        for target in TARGETS[config.targets]
    }
    return [
        Adapter(name, LoraWeights(modules, name, "common" if common_a else name), Path(name), shape)
        for name in agent_names(agents)
    ]
