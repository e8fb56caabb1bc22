"""What is cached, for people and programs to look at: plain data, copied out of the store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from precache.cache.store import TrajectoryStore
from precache.cache.trajectory import Trajectory, WriterRun, storage_bytes
from precache.engine.work import Work

StripKind = Literal["strip", "hidden states"]


@dataclass(frozen=True)
class StripInfo:
    """What is kept beside the base for the agents ``readers``: which positions it covers, and its bytes.

    A strip of ``kind`` "hidden states" is not any reader's: the passes that recompute a part of k and v start from it.
    """

    key: str
    kind: StripKind
    readers: tuple[str, ...]
    covered: tuple[tuple[int, int], ...]
    bytes: int


@dataclass(frozen=True)
class SessionInfo:
    """One cached trajectory. ``writers`` says who wrote which positions; ``pending_tokens`` await the neutral pass."""

    session_id: str
    namespace: str
    token_ids: tuple[int, ...]
    writers: tuple[WriterRun, ...]
    strips: tuple[StripInfo, ...]
    pending_tokens: int
    base_bytes: int
    bytes: int
    busy: bool

    @property
    def length(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class CacheStats:
    """Counters since the engine was loaded. ``lookups`` counts requests by outcome (see cache.store.Lookup).

    ``neutral_tokens`` were run with adapters off: deferred, beside a turn, or in idle time. The counts behind it are
    those of ``Usage``, summed over the turns and with what ran in idle time.
    """

    lookups: Mapping[str, int]
    reused_tokens: int
    evictions: int
    sessions: int
    bytes_held: int
    peak_bytes: int
    budget: int
    neutral_tokens: int = 0
    refreshed_kv_entries: int = 0
    recomputed_token_layers: int = 0
    catch_up_flops: int = 0
    flops: int = 0


def describe(trajectory: Trajectory, readers: Mapping[str, tuple[str, ...]]) -> SessionInfo:
    """Copy out one trajectory. ``readers`` maps strip keys to the agents that read them."""
    pending = trajectory.pending_from
    return SessionInfo(
        session_id=trajectory.session_id,
        namespace=trajectory.namespace,
        token_ids=tuple(trajectory.token_ids.tolist()),
        writers=tuple(trajectory.runs),
        strips=tuple(
            StripInfo(
                key,
                "hidden states" if any(strip.layout.h_widths) else "strip",
                readers.get(key, ()),
                tuple(strip.covered),
                storage_bytes(strip.tensors()),
            )
            for key, strip in trajectory.strips.items()
        ),
        pending_tokens=0 if pending is None else trajectory.length - pending,
        base_bytes=storage_bytes(trajectory.base.tensors()),
        bytes=trajectory.bytes_held(),
        busy=trajectory.busy > 0,
    )


def stats(store: TrajectoryStore, neutral_tokens: int, work: Work, catch_up: Work) -> CacheStats:
    """Copy out the counters. ``work`` is that of all passes, ``catch_up`` of those over reused tokens."""
    return CacheStats(
        lookups={outcome.value: count for outcome, count in store.lookups.items()},
        reused_tokens=store.reused_tokens,
        evictions=store.evictions,
        sessions=len(store.trajectories),
        bytes_held=store.bytes_held(),
        peak_bytes=store.peak_bytes,
        budget=store.budget,
        neutral_tokens=neutral_tokens,
        refreshed_kv_entries=catch_up.kv_entries,
        recomputed_token_layers=catch_up.token_layers,
        catch_up_flops=catch_up.flops,
        flops=work.flops,
    )
