"""`bench serving`: the controlled trace at a request rate, against real server processes.

Owns the order: every row (vLLM as it is, and the plugin's policies) gets a server of its own, which plays all rates;
the rows follow one another, and the whole is repeated, so that ratios are taken between neighbours in time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from precache.bench.adapters import agent_names, write_random_adapters
from precache.bench.checks import require_positive
from precache.bench.serving.load import Load, Play, play
from precache.bench.serving.process import running_server
from precache.bench.serving.summary import STOCK, ServingRow, summarise
from precache.bench.shapes import model_config
from precache.bench.trace import ROUNDS, Trace, controlled_trace
from precache.config import parse_size
from precache.engine.checkpoints import resolve_model
from precache.engine.model import model_shape_from_config
from precache.errors import ConfigError
from precache.vllm_plugin.launch import Launch
from precache.vllm_plugin.settings import PLUGIN_POLICIES

__all__ = ["STOCK", "ServingConfig", "ServingRow", "bench_serving"]


@dataclass(frozen=True)
class ServingConfig:
    """What to measure. ``rows`` are policies of the plugin, and ``stock-vllm`` for vLLM without it.

    ``qps`` are requests per second over all trajectories, as offered: trajectories start at random (Poisson) moments,
    so often that their turns would come at that rate if each were answered at once. ``trajectories`` start per rate.
    """

    model: str = "smollm2"
    rows: tuple[str, ...] = (STOCK, "nonshared", "prelrshared", "rebaseshared")
    qps: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0)
    chunk: int = 512
    rounds: int = ROUNDS
    agents: int = 3
    adapters: Mapping[str, Path] = field(default_factory=dict)
    trajectories: int = 4
    repeats: int = 1
    seed: int = 0
    dtype: str | None = None
    cache_memory: str = "2GiB"
    flags: tuple[str, ...] = ()  # of vLLM's server, for every row

    def __post_init__(self) -> None:
        require_positive(self, "chunk", "rounds", "agents", "trajectories", "repeats")
        if not self.qps or min(self.qps) <= 0:
            raise ConfigError("--qps", list(self.qps), "requests per second, above 0")
        known = (STOCK, *PLUGIN_POLICIES)
        if not self.rows or (unknown := [row for row in self.rows if row not in known]):
            raise ConfigError("--policies", unknown if self.rows else "none", f"{list(known)}")
        parse_size(self.cache_memory, "--cache-memory")

    def agent_names(self) -> list[str]:
        return list(self.adapters) or agent_names(self.agents)

    def trace(self) -> Trace:
        return controlled_trace(self.chunk, self.agent_names(), rounds=self.rounds)


def bench_serving(config: ServingConfig) -> list[ServingRow]:
    """Measure. Raises PrecacheError for what cannot be served, and ServerError."""
    plays: dict[tuple[str, float], list[Play]] = {}
    total = len(config.rows) * len(config.qps) * config.repeats
    model = resolve_model(config.model)
    vocab_size = int(model_config(model).vocab_size)
    with _adapters(config, model) as adapters, tqdm(total=total, disable=None) as progress:
        for repeat in range(config.repeats):
            for row in config.rows:
                launch = _launch(config, model, adapters, row)
                with running_server(launch) as server:
                    for qps in config.qps:
                        progress.set_description(f"{row} at {qps:g}/s")
                        load = Load(config.trace(), qps, config.trajectories, vocab_size)
                        played = play(server, load, seed=config.seed + 1000 * repeat)
                        plays.setdefault((row, qps), []).append(played)
                        progress.update()
    return summarise(plays, config.trace())


def _launch(config: ServingConfig, model: str, adapters: Mapping[str, Path], row: str) -> Launch:
    return Launch(
        model=model,
        adapters=adapters,
        policy=None if row == STOCK else row,
        served_name="base",
        port=0,
        dtype=config.dtype,
        max_model_len=config.trace().tokens + 1,
        cache_bytes=parse_size(config.cache_memory),
        extra=config.flags,
    )


@contextmanager
def _adapters(config: ServingConfig, model: str) -> Iterator[Mapping[str, Path]]:
    """The adapters given, or random ones."""
    if config.adapters:
        yield config.adapters
        return
    shape = model_shape_from_config(model_config(model))
    with tempfile.TemporaryDirectory(prefix="precache-bench-") as folder:
        yield write_random_adapters(shape, config.agent_names(), Path(folder), config.seed)
