"""A small simulation of many trajectories on several replicas: routing, eviction, offload.

Costs come from the formulas of physics.py at rates that were measured. A replica serves one turn at a time, in the
order of arrival; batching would raise every throughput alike and is left out.
"""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict
from dataclasses import dataclass, field
from statistics import quantiles

from precache.bench.physics import (
    LoraSize,
    Method,
    ModelSize,
    adapted_flops,
    bytes_per_token,
    decode_bytes,
    prefill_flops,
)
from precache.bench.trace import Step, Trace
from precache.errors import ConfigError

ROUTINGS = ("trajectory", "adapter", "random")


@dataclass(frozen=True)
class Rates:
    """What a replica does in a second: operations of a prefill, bytes of a decode step, bytes from offload storage.

    ``offload`` 0 means that evicted caches are lost.
    """

    flops: float
    read_bytes: float
    offload_bytes: float = 0.0


@dataclass(frozen=True)
class Fleet:
    """Replicas with ``cache_bytes`` each.

    ``routing``: a trajectory stays on the replica that was least busy when it began (``trajectory``), every adapter has
    a replica of its own (``adapter``), or each turn goes anywhere (``random``).
    """

    replicas: int
    cache_bytes: int
    routing: str = "trajectory"

    def __post_init__(self) -> None:
        if self.routing not in ROUTINGS:
            raise ConfigError("routing", self.routing, f"one of {ROUTINGS}")
        for name in ("replicas", "cache_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "at least 1")


@dataclass(frozen=True)
class Load:
    """``trajectories`` at the same time, each played to its end and begun anew until ``finished`` have ended.

    ``think_s`` passes between the turns of a trajectory.
    """

    trace: Trace
    trajectories: int
    finished: int
    think_s: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """What came of it. ``reused`` is the share of prompt tokens that needed no pass; seconds are simulated ones."""

    turns_per_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    reused: float
    evictions: int


@dataclass
class _Replica:
    room: int
    free_at: float = 0.0
    held: int = 0
    evictions: int = 0
    # (trajectory, whose cache) -> tokens; the least recently used first
    caches: OrderedDict[tuple[int, str], int] = field(default_factory=OrderedDict)

    def keep(self, key: tuple[int, str], tokens: int, each: int) -> None:
        """Hold ``tokens`` under a key, ``each`` bytes a token, and evict others for it."""
        self.held += (tokens - self.caches.pop(key, 0)) * each
        while self.held > self.room and self.caches:
            _, lost = self.caches.popitem(last=False)
            self.held -= lost * each
            self.evictions += 1
        self.caches[key] = tokens


def simulate(
    size: ModelSize,
    lora: LoraSize,
    method: Method,
    fleet: Fleet,
    load: Load,
    rates: Rates,
    *,
    itemsize: int = 2,
) -> Outcome:
    """Play a load on a fleet. Raises ConfigError for a method with catch-up passes, which is not modelled."""
    if method.catch_up:
        raise ConfigError("method", "catch_up", "methods without catch-up passes")
    return _Simulation(size, lora, method, fleet, load, rates, itemsize).run()


class _Simulation:
    def __init__(
        self,
        size: ModelSize,
        lora: LoraSize,
        method: Method,
        fleet: Fleet,
        load: Load,
        rates: Rates,
        itemsize: int,
    ) -> None:
        self._size, self._lora, self._method = size, lora, method
        self._fleet, self._load, self._rates = fleet, load, rates
        self._itemsize = itemsize
        one = LoraSize(1, lora.rank) if method.caches else lora  # the bytes of one cache
        self._each = bytes_per_token(size, one, method, itemsize)
        self._replicas = [_Replica(fleet.cache_bytes) for _ in range(fleet.replicas)]
        self._offloaded: dict[tuple[int, str], int] = {}
        self._random = random.Random(load.seed)
        self._homes: dict[int, _Replica] = {}

    def run(self) -> Outcome:
        load, steps = self._load, self._load.trace.steps
        waits: list[float] = []
        prompts = reused = ended = 0
        last = 0.0
        # (time, trajectory, turn, tokens before it): the next turn of every trajectory
        waiting = [(0.0, trajectory, 0, 0) for trajectory in range(load.trajectories)]
        begun = load.trajectories
        while ended < load.finished:
            arrival, trajectory, turn, length = heapq.heappop(waiting)
            step = steps[turn]
            replica = self._route(trajectory, step.agent)
            start = max(arrival, replica.free_at)
            ttft, service, found = self._serve(replica, trajectory, step, length)
            replica.free_at = start + service
            last = max(last, replica.free_at)
            waits.append(start - arrival + ttft)
            prompts += length + step.prompt
            reused += found
            turn, length = turn + 1, length + step.prompt + step.output
            if turn == len(steps):
                ended += 1
                trajectory, turn, length = begun, 0, 0
                begun += 1
            heapq.heappush(waiting, (replica.free_at + load.think_s, trajectory, turn, length))
        cuts = quantiles(waits, n=10)
        return Outcome(
            turns_per_s=len(waits) / last,
            ttft_p50_s=cuts[4],
            ttft_p90_s=cuts[8],
            reused=reused / prompts,
            evictions=sum(replica.evictions for replica in self._replicas),
        )

    def _route(self, trajectory: int, agent: str) -> _Replica:
        if self._fleet.routing == "random":
            return self._random.choice(self._replicas)
        if self._fleet.routing == "adapter":
            agents = self._load.trace.agents
            return self._replicas[agents.index(agent) % len(self._replicas)]
        if trajectory not in self._homes:
            self._homes[trajectory] = min(self._replicas, key=lambda replica: replica.free_at)
        return self._homes[trajectory]

    def _serve(
        self, replica: _Replica, trajectory: int, step: Step, length: int
    ) -> tuple[float, float, int]:
        """Seconds to the first token and in all, and the prompt tokens that were reused."""
        key = (trajectory, step.agent if self._method.caches else "")
        prompt = length + step.prompt
        found, seconds = min(replica.caches.get(key, 0), prompt - 1), 0.0
        if self._rates.offload_bytes and self._offloaded.get(key, 0) > found:
            kept = min(self._offloaded[key], prompt - 1)
            seconds += (kept - found) * self._each / self._rates.offload_bytes
            found = kept
        flops = adapted_flops(self._size, self._lora, self._method, prompt - found, found)
        ttft = seconds = seconds + flops / self._rates.flops
        for context in range(prompt, prompt + step.output - 1):
            read = decode_bytes(self._size, self._lora, self._method, context, self._itemsize)
            seconds += read / self._rates.read_bytes
        end = prompt + step.output - 1
        if self._method.neutral:
            seconds += prefill_flops(self._size, end - found, found) / self._rates.flops
        replica.keep(key, end, self._each)
        if self._rates.offload_bytes:
            self._offloaded[key] = end
        return ttft, seconds, found
