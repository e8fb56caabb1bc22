"""`bench turns`: total time to first token, throughput and cache bytes of every policy on the controlled trace.

Owns which rows are played in which order, and the guard that the stock row and the engine compute the same thing.
The policies are played one after the other within each repeat, so that ratios are taken between neighbours in time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from precache import Engine
from precache.bench.adapters import agent_names, write_random_adapters
from precache.bench.player import EnginePlayer, Player, Run, play_trace
from precache.bench.stock import StockPlayer
from precache.bench.summary import STOCK, Row, RowKey, summarise
from precache.bench.trace import ROUNDS, Step, Trace, controlled_trace
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

    ``think_s`` is the time that passes between turns, as when agents wait for tools.
    """

    model: str = "smollm2"
    chunks: tuple[int, ...] = (256, 512, 1024, 2048)
    rows: tuple[RowKey, ...] = ()
    agents: int = 3
    rounds: int = ROUNDS
    adapters: Mapping[str, Path] = field(default_factory=dict)
    repeats: int = 3
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"
    cache_memory: str = "4GiB"
    think_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("agents", "rounds", "repeats"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name}", getattr(self, name), "an integer of at least 1")
        if not self.chunks or min(self.chunks) < 1:
            raise ConfigError("--chunk", list(self.chunks), "lengths of at least 1 token")
        if not self.rows:
            raise ConfigError("--policies", "none", f"names among {[STOCK, *POLICIES]}")
        if self.think_s < 0:
            raise ConfigError("--think", self.think_s, "seconds, 0 or more")
        for row in self.rows:
            if row.policy != STOCK:
                make_policy(row.policy, row.schedule)

    def agent_names(self) -> list[str]:
        return list(self.adapters) or agent_names(self.agents)

    def trace(self, chunk: int) -> Trace:
        return controlled_trace(chunk, self.agent_names(), rounds=self.rounds)


@dataclass(frozen=True)
class TurnsReport:
    """The rows, what the engine settled on, and how far the stock row and nonshared were apart (None: no guard ran)."""

    rows: tuple[Row, ...]
    dtype: str
    device: str
    guard_error: float | None


def bench_turns(config: TurnsConfig) -> TurnsReport:
    """Measure. Raises PrecacheError for what cannot be loaded or does not fit, and GuardError."""
    traces = {chunk: config.trace(chunk) for chunk in config.chunks}
    with _loaded(config, traces) as bench:
        guard_error = bench.guard()
        rows = [row for chunk, trace in traces.items() for row in bench.measure(chunk, trace)]
        return TurnsReport(tuple(rows), bench.dtype, str(bench.engine.model.device), guard_error)


@contextmanager
def _loaded(config: TurnsConfig, traces: Mapping[int, Trace]) -> Iterator[_Bench]:
    engine = _engine(config, longest=max(trace.tokens for trace in traces.values()))
    with engine, tempfile.TemporaryDirectory(prefix="precache-bench-") as folder:
        adapters = config.adapters or write_random_adapters(
            engine.model.shape, config.agent_names(), Path(folder), config.seed
        )
        for name, path in adapters.items():
            engine.add_adapter(name, path)
        yield _Bench(config, engine, adapters)


def _engine(config: TurnsConfig, longest: int) -> Engine:
    """An engine that takes and gives token ids, as the stock row does."""
    settings = EngineConfig(
        policy="nonshared",
        dtype=config.dtype,
        device=config.device,
        cache_memory=parse_size(config.cache_memory),
    )
    model = BackboneModel.load(config.model, settings)
    # Positions beyond the trained window take as long as others, and the trace's text is random anyway.
    model.context_window = max(model.context_window, longest)
    return Engine(model, None, settings)


class _Bench:
    """The loaded model and adapters, and the rows that are played on them."""

    def __init__(self, config: TurnsConfig, engine: Engine, adapters: Mapping[str, Path]) -> None:
        self.config = config
        self.engine = engine
        self.dtype = str(engine.model.dtype).removeprefix("torch.")
        self._stock: StockPlayer | None = None
        if any(row.policy == STOCK for row in config.rows):
            self._stock = StockPlayer(
                resolve_model(config.model),
                adapters,
                dtype=engine.model.dtype,
                device=engine.model.device,
            )

    def guard(self) -> float | None:
        """Largest difference of stock-peft and nonshared on a short trace, as a share of the largest logit."""
        if self._stock is None:
            return None
        agents = self.config.agent_names()
        steps = [Step(agent, GUARD_PROMPT, GUARD_OUTPUT) for agent in agents] * GUARD_ROUNDS
        trace = Trace(tuple(steps))
        largest, allowed = 0.0, GUARD_TOLERANCE[self.dtype]
        trajectory: list[int] = []
        for turn, (step, fresh) in enumerate(zip(trace.steps, self._prompts(trace), strict=True)):
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
        with tqdm(total=total, desc=f"chunk {chunk}", disable=None, leave=False) as progress:
            for player in players.values():
                play_trace(player, warm_up, self._prompts(warm_up))
            for _ in range(self.config.repeats):
                for row, player in players.items():
                    runs[row].append(self._play(player, trace))
                    player.reset()
                    progress.update()
        return summarise(chunk, len(self.config.agent_names()), trace, runs)

    def _play(self, player: Player, trace: Trace) -> Run:
        return play_trace(player, trace, self._prompts(trace), self.config.think_s)

    def _prompts(self, trace: Trace) -> list[list[int]]:
        return trace.fresh_prompts(self.engine.model.shape.vocab_size, self.config.seed)

    def _player(self, row: RowKey) -> Player:
        if row.policy == STOCK:
            assert self._stock is not None
            return self._stock
        return EnginePlayer(self.engine.with_policy(row.policy, row.schedule))
