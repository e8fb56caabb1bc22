"""Remembers the last turns, finds prompts that cannot be shared, and looks into the engine without waiting for it.

Turns are reported from the queue's thread, everything else is asked for in the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

from precache.cache.store import Lookup
from precache.engine.engine import Engine
from precache.engine.sessions import CacheStats, SessionInfo
from precache.request import GenerationOutput
from precache.server.hints import Hint, HintFinder
from precache.server.metrics import Metrics

_log = logging.getLogger(__name__)

MAX_TURNS = 200
MAX_HINTS = 20


@dataclass
class TurnRecord:
    """One turn for people to look at. ``computed_tokens`` of the prompt had to be run before the first token."""

    number: int
    model: str
    started: float  # seconds since the epoch
    queue_s: float
    prompt_tokens: int
    state: str = "running"  # or done, failed
    session_id: str | None = None
    lookup: str | None = None
    cached_tokens: int = 0
    shared_tokens: int = 0
    computed_tokens: int = 0
    catch_up_tokens: int = 0
    completion_tokens: int = 0
    ttft_s: float | None = None
    total_s: float | None = None
    neutral_wait_s: float = 0.0
    finish_reason: str | None = None


@dataclass(frozen=True)
class Snapshot:
    """The engine at one moment."""

    taken: float
    stats: CacheStats
    sessions: tuple[SessionInfo, ...]


class Monitor:
    """The memory of one server."""

    def __init__(self, engine: Engine, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._lock = threading.Lock()
        self._turns: deque[TurnRecord] = deque(maxlen=MAX_TURNS)
        self._hints: deque[Hint] = deque(maxlen=MAX_HINTS)
        self._finder = HintFinder(engine.tokenizer)
        self._count = 0
        self._lookups: Counter[Lookup] = Counter()
        self.latest = self._look()
        self._looking: asyncio.Task[Snapshot] | None = None

    # -- reports of the queue's thread ---------------------------------------------------------------------------

    def begin(self, model: str, agent: str, prompt: Sequence[int], queue_s: float) -> TurnRecord:
        """A turn starts now, ``queue_s`` after its request came."""
        self._lookups = Counter(self._engine.store.lookups)
        with self._lock:
            self._count += 1
            record = TurnRecord(self._count, model, time.time(), queue_s, len(prompt))
            self._turns.append(record)
        hint = self._finder.look(agent, model, prompt)
        if hint is not None:
            _log.warning("%s", hint)
            with self._lock:
                self._hints.append(hint)
        return record

    def token(self, record: TurnRecord) -> None:
        """The turn produced a token."""
        record.completion_tokens += 1
        if record.ttft_s is None:
            record.ttft_s = time.time() - record.started

    def finish(self, record: TurnRecord, output: GenerationOutput) -> None:
        """The turn ended by itself."""
        usage, timings = output.usage, output.timings
        record.session_id = output.session_id
        record.lookup = self._lookup()
        record.cached_tokens, record.shared_tokens = usage.cached_tokens, usage.shared_tokens
        record.computed_tokens = usage.prefill_tokens
        record.catch_up_tokens = usage.catch_up_tokens
        record.completion_tokens = usage.completion_tokens
        record.ttft_s, record.total_s = timings.ttft_s, timings.total_s
        record.neutral_wait_s = timings.neutral_wait_s
        record.finish_reason = output.finish_reason
        record.state = "done"
        self._metrics.turn_finished(record.model, record.queue_s, output)

    def fail(self, record: TurnRecord, reason: str) -> None:
        """The turn ended by an error, a cancellation or a client that went away."""
        if record.state == "running":
            record.finish_reason = reason
            record.lookup = self._lookup()
            record.total_s = time.time() - record.started
            record.state = "failed"  # last: the page does not ask for a settled turn again
            self._metrics.turn_failed(record.model)

    def _lookup(self) -> str | None:
        """What became of this turn's lookup; turns run one at a time, so the only new one is its own."""
        new = self._engine.store.lookups - self._lookups
        return next((outcome.value for outcome in new), None)

    # -- questions of the event loop -----------------------------------------------------------------------------

    def turns(self, after: int = 0) -> list[dict[str, object]]:
        """The last turns with a number above ``after``, oldest first."""
        with self._lock:
            return [asdict(turn) for turn in self._turns if turn.number > after]

    def hints(self) -> list[dict[str, object]]:
        """The last hints, oldest first."""
        with self._lock:
            return [asdict(hint) for hint in self._hints]

    async def snapshot(self, patience_s: float) -> Snapshot:
        """The engine's state now; the last one known if the engine does not answer in ``patience_s``.

        A forward pass may hold the engine for seconds. However many ask, at most one thread waits for it.
        """
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(asyncio.to_thread(self._look))
        with suppress(TimeoutError):
            self.latest = await asyncio.wait_for(asyncio.shield(self._looking), patience_s)
        return self.latest

    def _look(self) -> Snapshot:
        return Snapshot(time.time(), self._engine.stats(), self._engine.sessions())
