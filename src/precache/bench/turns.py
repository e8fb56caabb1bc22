"""`bench turns`: total time to first token, throughput and cache bytes of every policy on the controlled trace.

Owns which rows are played in which order, and the guard that the stock row and the engine compute the same thing.
The policies are played one after the other within each repeat, so that ratios are taken between neighbours in time.
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
from precache.bench.player import EnginePlayer, Player, Run, play_trace
from precache.bench.random_model import RANDOM_LLAMA, write_random_llama
from precache.bench.stock import StockPlayer
from precache.bench.summary import STOCK, Row, RowKey, summarise
from precache.bench.trace import (
    LONG_DECODE,
    ROUNDS,
    Step,
    Trace,
    chunk_for,
    controlled_trace,
)
from precache.config import EngineConfig, parse_size
from precache.engine.checkpoints import resolve_model
from precache.engine.model import BackboneModel
from precache.engine.policies import POLICIES, make_policy
from precache.errors import ConfigError, PrecacheError

GUARD_PROMPT, GUARD_OUTPUT, GUARD_ROUNDS = 16, 6, 2  # the guard's turns: every agent in every round
WARM_UP_TURNS = 3  # of which the first is a prefill of more than one pass
GUARD_TOLERANCE = {"float32": 2e-3, "bfloat16": 0.1, "float16": 0.02}  # of the largest logit


class GuardError(PrecacheError):
    """The stock row and nonshared disagree: one of them is wrong, and its time means nothing."""

    def __init__(self, agent: str, turn: int, got: float, allowed: float) -> None:
        self.got = got
        self.allowed = allowed
        super().__init__(
            f"stock-peft and nonshared differ at turn {turn} ({agent}): got {got:.2e} of the largest logit, "
            f"allowed is {allowed:.0e}"
        )


@dataclass(frozen=True)
class TurnsConfig:
    """What to measure. ``rows`` are (policy, schedule); ``adapters`` empty means random ones for ``agents`` agents.

    Every number of agents, every length (a ``chunk``, or total tokens in ``lengths``) and every share of common context
    is a case of its own. ``think_s`` is the time that passes between turns, as when agents wait for tools.
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
            if row.policy != STOCK:
                make_policy(row.policy, row.schedule)
        for names in self.crews():
            self.cases(names)

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
    """The rows, what the engine settled on, and how far the stock row and nonshared were apart (None: no guard ran)."""

    rows: tuple[Row, ...]
    dtype: str
    device: str
    guard_error: float | None


def bench_turns(config: TurnsConfig) -> TurnsReport:
    """Measure. Raises PrecacheError for what cannot be loaded or does not fit, and GuardError."""
    rows: list[Row] = []
    guard_errors: list[float] = []
    with tempfile.TemporaryDirectory(prefix="precache-bench-") as folder:
        model = config.model
        if model == RANDOM_LLAMA:
            model = write_random_llama(Path(folder) / "model", config.seed)
        for names in config.crews():
            cases = config.cases(names)
            longest = max(trace.tokens for _, trace in cases)
            with _engine(config, model, longest) as engine:
                bench = _Bench(config, engine, model, _add_adapters(config, engine, names, folder))
                if (error := bench.guard(names)) is not None:
                    guard_errors.append(error)
                rows += [row for chunk, trace in cases for row in bench.measure(chunk, trace)]
            dtype, device = bench.dtype, str(engine.model.device)
    return TurnsReport(tuple(rows), dtype, device, max(guard_errors, default=None))


def _add_adapters(
    config: TurnsConfig, engine: Engine, names: Sequence[str], folder: str
) -> Mapping[str, Path]:
    adapters = config.adapters or write_random_adapters(
        engine.model.shape,
        names,
        Path(folder) / f"{len(names)}-agents",
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

    def __init__(
        self, config: TurnsConfig, engine: Engine, model: str, adapters: Mapping[str, Path]
    ) -> None:
        self.config = config
        self.engine = engine
        self.dtype = str(engine.model.dtype).removeprefix("torch.")
        self._stock: StockPlayer | None = None
        if any(row.policy == STOCK for row in config.rows):
            self._stock = StockPlayer(
                resolve_model(model),
                adapters,
                dtype=engine.model.dtype,
                device=engine.model.device,
            )

    def guard(self, agents: Sequence[str]) -> float | None:
        """Largest difference of stock-peft and nonshared on a short trace, as a share of the largest logit."""
        if self._stock is None:
            return None
        steps = [Step(agent, GUARD_PROMPT, GUARD_OUTPUT) for agent in agents] * GUARD_ROUNDS
        trace = Trace(tuple(steps))
        largest, allowed = 0.0, GUARD_TOLERANCE[self.dtype]
        trajectory: list[int] = []
        prompts = trace.fresh_prompts(self._vocab_size, self.config.seed)
        for turn, (step, fresh) in enumerate(zip(trace.steps, prompts, strict=True)):
            trajectory += fresh
            expected = self._stock.logits(step.agent, trajectory, step.output)
            output = expected.argmax(-1).tolist()
            got = self.engine.score(step.agent, trajectory, output)
            difference = float((got - expected).abs().max() / expected.abs().max())
            if not difference <= allowed:
                raise GuardError(step.agent, turn, difference, allowed)
            largest = max(largest, difference)
            trajectory += output
        self._stock.reset()
        self.engine.reset()
        return largest

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
        if row.policy == STOCK:
            assert self._stock is not None
            return self._stock
        return EnginePlayer(self.engine.with_policy(row.policy, row.schedule))
