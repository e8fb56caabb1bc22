"""Plays a trace on something that generates, and times it from the outside.

A player is anything with the methods of ``Player``. The clock runs in ``play_trace`` only, so every row of a
benchmark is timed by the same lines: tokens are seen as a caller of ``stream`` sees them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from precache import Engine
from precache.bench.trace import AgentViews, Trace


@dataclass(frozen=True)
class Work:
    """What a turn had to run, beside its output tokens: counts of tokens, and seconds where they are known.

    ``prefilled`` are the prompt tokens that were not reused, ``catch_up`` those run again for the reader's strip,
    ``neutral`` those run with adapters off. ``neutral_wait_s`` is part of the time to first token, ``neutral_s`` comes
    after the last token. By count (see precache.request.Usage): ``flops`` of everything, ``catch_up_flops`` and
    ``refreshed_kv_entries`` of what was run again for the reader.
    """

    prefilled: int = 0
    catch_up: int = 0
    neutral: int = 0
    neutral_wait_s: float = 0.0
    neutral_s: float = 0.0
    flops: int = 0
    catch_up_flops: int = 0
    refreshed_kv_entries: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.prefilled + other.prefilled,
            self.catch_up + other.catch_up,
            self.neutral + other.neutral,
            self.neutral_wait_s + other.neutral_wait_s,
            self.neutral_s + other.neutral_s,
            self.flops + other.flops,
            self.catch_up_flops + other.catch_up_flops,
            self.refreshed_kv_entries + other.refreshed_kv_entries,
        )


@dataclass(frozen=True)
class CacheBytes:
    """Bytes of cache: the most since ``reset``, and now held as k and v, and as strips."""

    peak: int
    base: int
    strips: int


class Clock(NamedTuple):
    """A moment, or a stretch of time: seconds on the wall, and of processors at work for a player."""

    wall: float
    cpu: float

    @classmethod
    def now(cls, player: Player) -> Clock:
        return cls(time.perf_counter(), player.cpu_s())

    def plus(self, start: Clock, end: Clock) -> Clock:
        """This stretch and the one from ``start`` to ``end``."""
        return Clock(self.wall + end.wall - start.wall, self.cpu + end.cpu - start.cpu)


class Player(Protocol):
    """One row of a benchmark: a policy of the engine, or something to compare with."""

    def stream(self, agent: str, prompt_ids: Sequence[int], output_tokens: int) -> Iterator[int]:
        """Yield exactly ``output_tokens`` greedy tokens, and end when everything the turn owes is done."""

    def work(self) -> Work:
        """What the last turn had to run."""

    def cache_bytes(self) -> CacheBytes:
        """What is cached now."""

    def reset(self) -> None:
        """Drop everything cached."""

    def cpu_s(self) -> float:
        """Processor seconds so far of all threads at work for this player: this process's, unless it has others."""
        return time.process_time()


class Peer(Player, Protocol):
    """A row that is not the engine's. Its time means something once it is known to compute what ``nonshared`` does."""

    def likely(self, agent: str, prompt_ids: Sequence[int], output_tokens: int) -> list[Likely]:
        """Run a turn as ``stream`` does; of every output token, what it was chosen among."""


class Likely(NamedTuple):
    """A greedy choice: the token, and log-probabilities of the likeliest tokens by id, before anything is sampled."""

    token_id: int
    logprobs: dict[int, float]


@dataclass(frozen=True)
class Run:
    """One play of a trace. Seconds are sums over its turns; ``_cpu_s`` is processor time of all threads at work for the
    row, which other programs on the machine hardly change.

    ``decode_s`` covers ``decoded`` tokens: from a turn's first token to its last but one, which is the last whose
    arrival cannot hide a neutral pass.
    """

    ttft_s: float
    wall_s: float
    decode_s: float
    ttft_cpu_s: float
    decode_cpu_s: float
    decoded: int
    work: Work
    cache_bytes: CacheBytes
    outputs: tuple[tuple[int, ...], ...]


def play_trace(
    player: Player, trace: Trace, *, vocab_size: int, seed: int, think_s: float = 0.0
) -> Run:
    """Play a trace of random tokens from an empty cache. ``think_s`` passes, untimed, between turns."""
    player.reset()
    views = AgentViews(trace, vocab_size)
    none = Clock(0.0, 0.0)
    ttft = wall = decode = none
    decoded, work = 0, Work()
    outputs = []
    for step, fresh in zip(trace.steps, trace.fresh_prompts(vocab_size, seed), strict=True):
        prompt = views.extend(step.agent, fresh)
        started = Clock.now(player)
        tokens, arrivals = _arrivals(player, player.stream(step.agent, prompt, step.output))
        wall = wall.plus(started, Clock.now(player))
        ttft = ttft.plus(started, arrivals[0])
        if len(arrivals) > 1:
            decode = decode.plus(arrivals[0], arrivals[-2])
            decoded += len(arrivals) - 2
        work += player.work()
        views.extend(step.agent, tokens)
        outputs.append(tuple(tokens))
        if think_s:
            time.sleep(think_s)
    return Run(
        ttft_s=ttft.wall,
        wall_s=wall.wall,
        decode_s=decode.wall,
        ttft_cpu_s=ttft.cpu,
        decode_cpu_s=decode.cpu,
        decoded=decoded,
        work=work,
        cache_bytes=player.cache_bytes(),
        outputs=tuple(outputs),
    )


def _arrivals(player: Player, stream: Iterator[int]) -> tuple[list[int], list[Clock]]:
    """Tokens, and when each came."""
    tokens, arrivals = [], []
    for token_id in stream:
        arrivals.append(Clock.now(player))
        tokens.append(token_id)
    return tokens, arrivals


class EnginePlayer(Player):
    """A policy of the engine, used through its public ``stream``."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._work = Work()

    def stream(self, agent: str, prompt_ids: Sequence[int], output_tokens: int) -> Iterator[int]:
        chunks = self.engine.stream(
            agent, list(prompt_ids), max_tokens=output_tokens, ignore_eos=True, temperature=0.0
        )
        for chunk in chunks:
            if chunk.output is not None:
                usage, timings = chunk.output.usage, chunk.output.timings
                self._work = Work(
                    usage.prefill_tokens,
                    usage.catch_up_tokens,
                    usage.neutral_tokens,
                    timings.neutral_wait_s,
                    timings.neutral_s,
                    usage.flops,
                    usage.catch_up_flops,
                    usage.refreshed_kv_entries,
                )
                self._synchronise()
            yield from chunk.token_ids

    def _synchronise(self) -> None:
        """Wait for what an accelerator still has to do, so that it is not counted to the next turn."""
        if self.engine.model.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.engine.model.device)

    def work(self) -> Work:
        return self._work

    def cache_bytes(self) -> CacheBytes:
        sessions = self.engine.sessions()
        return CacheBytes(
            peak=self.engine.stats().peak_bytes,
            base=sum(session.base_bytes for session in sessions),
            strips=sum(strip.bytes for session in sessions for strip in session.strips),
        )

    def reset(self) -> None:
        self.engine.reset()
