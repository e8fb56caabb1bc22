"""`bench turns`: total time to first token, throughput and cache bytes of every policy on the controlled trace.

Owns which rows are played in which order. They are played one after the other within each repeat, so that ratios are
taken between neighbours in time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from precache import Engine
from precache.bench.adapters import LORA_RANK, agent_names, write_random_adapters
from precache.bench.checks import require_agents, require_positive, require_targets
from precache.bench.guard import largest_difference
from precache.bench.llama_cpp import LlamaCppTree
from precache.bench.peers import ready_peers
from precache.bench.player import EnginePlayer, Peer, Player, Run, play_trace
from precache.bench.random_model import RANDOM_LLAMA, write_random_llama
from precache.bench.summary import LLAMA_CPP, PEERS, STOCK, Row, RowKey, summarise
from precache.bench.trace import LONG_DECODE, ROUNDS, Trace, chunk_for, controlled_trace
from precache.config import EngineConfig, parse_size
from precache.engine.checkpoints import SMOLLM2, resolve_model
from precache.engine.model import BackboneModel
from precache.engine.policies import POLICIES, make_policy
from precache.errors import ConfigError

WARM_UP_TURNS = 3  # of which the first is a prefill of more than one pass


@dataclass(frozen=True)
class TurnsConfig:
    """What to measure. ``rows`` are (policy, schedule); ``adapters`` empty means random ones for ``agents`` agents.

    Every number of agents, every length (a ``chunk``, or total tokens in ``lengths``) and every share of common context
    is a case of its own. ``think_s`` is the time that passes between turns, as when agents wait for tools. The row
    ``llama-cpp`` needs the tree that is played.
    """

    model: str = "smollm2"
    chunks: tuple[int, ...] = (256, 512, 1024, 2048)
    lengths: tuple[int, ...] = ()
    rows: tuple[RowKey, ...] = ()
    agents: tuple[int, ...] = (3,)
    shared: tuple[float, ...] = (1.0,)
    rounds: int = ROUNDS
    decode: int = LONG_DECODE
    adapters: Mapping[str, Path] = field(default_factory=dict)
    rank: int = LORA_RANK
    targets: str = "qv"
    repeats: int = 3
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"
    cache_memory: str = "4GiB"
    think_s: float = 0.0
    llama_cpp: LlamaCppTree | None = None

    def __post_init__(self) -> None:
        require_positive(self, "rounds", "repeats", "rank", "decode")
        require_agents(self.agents)
        if not self.chunks or min(self.chunks) < 1:
            raise ConfigError("--chunk", list(self.chunks), "lengths of at least 1 token")
        if not self.shared or not 0 <= min(self.shared) <= max(self.shared) <= 1:
            raise ConfigError("--shared", list(self.shared), "shares between 0 and 1")
        require_targets(self.targets)
        if not self.rows:
            raise ConfigError("--policies", "none", f"names among {[STOCK, *POLICIES]}")
        if self.think_s < 0:
            raise ConfigError("--think", self.think_s, "seconds, 0 or more")
        for row in self.rows:
            if row.policy not in PEERS:
                make_policy(row.policy, row.schedule)
        self._check_llama_cpp()
        for names in self.crews():
            self.cases(names)

    def _check_llama_cpp(self) -> None:
        if any(row.policy == LLAMA_CPP for row in self.rows) != (self.llama_cpp is not None):
            raise ConfigError(
                "--llama-cpp", self.llama_cpp, f"the tree of the row {LLAMA_CPP}, and no other"
            )
        if self.llama_cpp and self.model != SMOLLM2 and not Path(self.model).is_dir():
            raise ConfigError(
                "--model",
                self.model,
                f"with --llama-cpp a local folder with a tokenizer, or {SMOLLM2}",
            )

    def crews(self) -> list[list[str]]:
        """The names of the agents, for every number of agents."""
        return [list(self.adapters)] if self.adapters else [agent_names(n) for n in self.agents]

    def cases(self, names: Sequence[str]) -> list[tuple[int, Trace]]:
        """(chunk, trace) of every length and share. Raises ConfigError for a length that is too short."""
        shape = {"rounds": self.rounds, "decode": self.decode}
        chunks = [chunk_for(length, names, **shape) for length in self.lengths]
        if chunks and min(chunks) < 1:
            shortest = controlled_trace(1, names, **shape).tokens
            raise ConfigError(
                "--length", list(self.lengths), f"{shortest} tokens or more for {len(names)} agents"
            )
        return [
            (chunk, controlled_trace(chunk, names, shared=shared, **shape))
            for chunk in chunks or self.chunks
            for shared in self.shared
        ]


@dataclass(frozen=True)
class TurnsReport:
    """The rows, what the engine settled on, and how far every peer was from nonshared (nats, see bench/guard.py)."""

    rows: tuple[Row, ...]
    dtype: str
    device: str
    guard: Mapping[str, float]


def bench_turns(config: TurnsConfig) -> TurnsReport:
    """Measure. Raises PrecacheError for what cannot be loaded or does not fit, and GuardError."""
    with tempfile.TemporaryDirectory(prefix="precache-bench-") as folder:
        model = config.model
        if model == RANDOM_LLAMA:
            model = write_random_llama(Path(folder) / "model", config.seed)
        reports = [_bench_crew(config, model, names, Path(folder)) for names in config.crews()]
    return TurnsReport(
        tuple(row for report in reports for row in report.rows),
        reports[0].dtype,
        reports[0].device,
        {row: max(report.guard[row] for report in reports) for row in reports[0].guard},
    )


def _bench_crew(config: TurnsConfig, model: str, names: Sequence[str], folder: Path) -> TurnsReport:
    """All cases of these agents."""
    cases = config.cases(names)
    longest = max(trace.tokens for _, trace in cases)
    with _engine(config, model, longest) as engine:
        adapters = _add_adapters(config, engine, names, folder)
        with ready_peers(
            {row.policy for row in config.rows},
            engine,
            resolve_model(model),
            adapters,
            llama_cpp=config.llama_cpp,
            context=longest,
            folder=folder / f"{len(names)}-agents-peers",
        ) as peers:
            bench = _Bench(config, engine, peers)
            guard = bench.guard(names)
            rows = tuple(row for chunk, trace in cases for row in bench.measure(chunk, trace))
        dtype = str(engine.model.dtype).removeprefix("torch.")
        return TurnsReport(rows, dtype, str(engine.model.device), guard)


def _add_adapters(
    config: TurnsConfig, engine: Engine, names: Sequence[str], folder: Path
) -> Mapping[str, Path]:
    adapters = config.adapters or write_random_adapters(
        engine.model.shape,
        names,
        folder / f"{len(names)}-agents",
        config.seed,
        rank=config.rank,
        targets=config.targets,
    )
    for name, path in adapters.items():
        engine.add_adapter(name, path)
    return adapters


def _engine(config: TurnsConfig, path: str, longest: int) -> Engine:
    """An engine that takes and gives token ids, as the stock row does."""
    settings = EngineConfig(
        policy="nonshared",
        dtype=config.dtype,
        device=config.device,
        cache_memory=parse_size(config.cache_memory),
    )
    model = BackboneModel.load(path, settings)
    # Positions beyond the trained window take as long as others, and the trace's text is random anyway.
    model.context_window = max(model.context_window, longest)
    return Engine(model, None, settings)


class _Bench:
    """The loaded model and adapters, and the rows that are played on them."""

    def __init__(self, config: TurnsConfig, engine: Engine, peers: Mapping[str, Peer]) -> None:
        self.config = config
        self.engine = engine
        self.peers = peers

    def guard(self, agents: Sequence[str]) -> dict[str, float]:
        """How far every peer is from nonshared. Raises GuardError."""
        return {
            row: largest_difference(row, peer, self.engine, agents, self.config.seed)
            for row, peer in self.peers.items()
        }

    def measure(self, chunk: int, trace: Trace) -> list[Row]:
        """Warm every row up, then play them in turn ``repeats`` times."""
        players = {row: self._player(row) for row in self.config.rows}
        runs: dict[RowKey, list[Run]] = {row: [] for row in players}
        warm_up = Trace(trace.steps[:WARM_UP_TURNS])
        total = len(players) * self.config.repeats
        with tqdm(
            total=total, desc=f"{trace.tokens} tokens", disable=None, leave=False
        ) as progress:
            for player in players.values():
                self._play(player, warm_up)
            for _ in range(self.config.repeats):
                for row, player in players.items():
                    runs[row].append(self._play(player, trace, self.config.think_s))
                    player.reset()
                    progress.update()
        return summarise(chunk, trace, runs)

    def _play(self, player: Player, trace: Trace, think_s: float = 0.0) -> Run:
        seed = self.config.seed
        return play_trace(player, trace, vocab_size=self._vocab_size, seed=seed, think_s=think_s)

    @property
    def _vocab_size(self) -> int:
        return self.engine.model.shape.vocab_size

    def _player(self, row: RowKey) -> Player:
        if row.policy in self.peers:
            return self.peers[row.policy]
        return EnginePlayer(self.engine.with_policy(row.policy, row.schedule))
