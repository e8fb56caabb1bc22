"""All cached trajectories: which one a prompt may continue, when it is truncated or forked, and what must be evicted.

The rule for a prompt that leaves a cached trajectory after ``matched`` common tokens: if the tail it drops is at most
``max(256, 25 % of matched)`` tokens, the trajectory is truncated in place (each role has its own cue at the end). A
longer tail is another branch: the common prefix is copied and both live on until one is evicted. A trajectory that a
running turn uses is always copied. If both branches do not fit into the budget, the older one gives way.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from precache.cache.layout import CacheLayout, StripLayout
from precache.cache.trajectory import TokenArray, Trajectory, Writer
from precache.errors import CacheBudgetError, UnknownSessionError

FORK_MIN_TAIL = 256
FORK_TAIL_SHARE = 0.25
MAX_LOST_RECORDS = 64
LEAST_STEPS = 32  # that a trajectory holds before its growth step doubles


class Lookup(StrEnum):
    """What became of one lookup. Everything but ``HIT`` is a miss, or a hit shorter than it could have been."""

    HIT = "hit"
    COLD = "cold"  # nothing cached for these agents yet
    TOO_SHORT = "too_short"  # a prompt of one token: its last token always runs
    DIVERGED = "diverged"  # the prompt differs from everything cached early on
    EVICTED = "evicted"  # a longer match was evicted
    ADAPTER_CHANGED = "adapter_changed"  # a longer match was dropped with its adapter's weights


@dataclass(frozen=True)
class _Lost:
    """Tokens that were cached once: only their ids, to tell why a lookup missed."""

    namespace: str
    token_ids: TokenArray
    reason: Lookup


@dataclass(frozen=True)
class Kept:
    """What the loaded adapters allow to be kept: strips, namespaces, and all tokens but those of stale writers."""

    strips: frozenset[str]
    namespaces: frozenset[str]
    stale: Callable[[Writer], bool]


class TrajectoryStore:
    """The trajectories of one engine under one memory budget (bytes). Not thread-safe: the engine holds a lock."""

    def __init__(self, layout: CacheLayout, budget: int, growth_tokens: int) -> None:
        self.layout = layout
        self.budget = budget
        self.growth_tokens = growth_tokens
        self.trajectories: list[Trajectory] = []
        self.lookups: Counter[Lookup] = Counter()
        self.reused_tokens = 0
        self.evictions = 0
        self.peak_bytes = 0
        self._lost: deque[_Lost] = deque(maxlen=MAX_LOST_RECORDS)
        self._kept: Kept | None = None
        self._clock = 0
        self._created = 0

    # -- lookup --------------------------------------------------------------------------------------------------

    def checkout(self, token_ids: Sequence[int], namespace: str) -> tuple[Trajectory, int]:
        """A trajectory that holds the longest reusable prefix of the prompt and nothing else, and that length.

        At most ``len(token_ids) - 1`` tokens are reused: the last one always runs. The trajectory is marked busy; give
        it back with ``release``.
        """
        prompt = np.asarray(token_ids, dtype=np.int32)
        source, matched = self._longest_match(prompt, namespace)
        forks = source is not None and matched > 0 and _forks(source, matched)
        self._count(prompt, namespace, matched, forks=forks)
        if source is None or matched == 0:
            return self._use(self.create(namespace)), 0
        if forks:
            return self._use(self._fork(source, matched)), matched
        source.truncate(matched)
        return self._use(source), matched

    def release(self, trajectory: Trajectory) -> None:
        trajectory.busy -= 1
        trajectory.private = None
        if trajectory.length == 0 and not trajectory.busy and trajectory in self.trajectories:
            self.trajectories.remove(trajectory)
        self._prune()

    def create(self, namespace: str) -> Trajectory:
        """A new, empty trajectory, the most recently used one."""
        self._created += 1
        self._clock += 1
        trajectory = Trajectory(
            self.layout,
            namespace,
            session_id=f"session-{self._created}",
            last_used=self._clock,
        )
        self.trajectories.append(trajectory)
        return trajectory

    def get(self, session_id: str) -> Trajectory:
        for trajectory in self.trajectories:
            if trajectory.session_id == session_id:
                return trajectory
        raise UnknownSessionError(session_id, [item.session_id for item in self.trajectories])

    def _use(self, trajectory: Trajectory) -> Trajectory:
        self._clock += 1
        trajectory.last_used = self._clock
        trajectory.busy += 1
        return trajectory

    def _longest_match(self, prompt: TokenArray, namespace: str) -> tuple[Trajectory | None, int]:
        best: Trajectory | None = None
        best_rank = (0, False, 0)
        for trajectory in self.trajectories:
            if trajectory.namespace == namespace:
                usable = trajectory.token_ids[: self._usable(trajectory)]
                matched = min(common_prefix(usable, prompt), len(prompt) - 1)
                rank = (matched, not trajectory.busy, trajectory.last_used)
                if best is None or rank > best_rank:
                    best, best_rank = trajectory, rank
        return best, best_rank[0]

    def _fork(self, source: Trajectory, length: int) -> Trajectory:
        source.busy += 1  # not evicted while it is copied
        fork = self.create(source.namespace)
        try:
            self.reserve(fork, length, [strip.layout for strip in source.strips.values()])
        except CacheBudgetError:
            self.trajectories.remove(fork)
            if source.busy > 1:
                raise
            source.truncate(length)
            return source
        finally:
            source.busy -= 1
        fork.copy_prefix(source, length)
        return fork

    # -- counting ------------------------------------------------------------------------------------------------

    def _count(self, prompt: TokenArray, namespace: str, matched: int, *, forks: bool) -> None:
        self.lookups[self._outcome(prompt, namespace, matched, forks=forks)] += 1
        self.reused_tokens += matched

    def _outcome(self, prompt: TokenArray, namespace: str, matched: int, *, forks: bool) -> Lookup:
        if len(prompt) < 2:
            return Lookup.TOO_SHORT
        # The newest first: of two that match equally well, it says what happened last.
        lost = [item for item in reversed(self._lost) if item.namespace == namespace]
        longest = max(lost, key=lambda item: common_prefix(item.token_ids, prompt), default=None)
        if longest is not None and common_prefix(longest.token_ids, prompt) > matched + 1:
            return longest.reason
        if matched == 0:
            cached = any(item.namespace == namespace for item in self.trajectories)
            return Lookup.DIVERGED if cached else Lookup.COLD
        return Lookup.DIVERGED if forks else Lookup.HIT

    def _remember_lost(self, trajectory: Trajectory, reason: Lookup) -> None:
        if trajectory.length:
            self._lost.append(_Lost(trajectory.namespace, trajectory.token_ids.copy(), reason))

    # -- memory --------------------------------------------------------------------------------------------------

    def bytes_held(self) -> int:
        """Bytes of the distinct storages of all trajectories."""
        return sum(trajectory.bytes_held() for trajectory in self.trajectories)

    def bytes_needed(self, tokens: int, strips: Sequence[StripLayout], private: int = 0) -> int:
        """Most bytes that a trajectory of so many tokens takes while it grows to that length.

        ``private`` of its tokens are held twice, as a turn's own k and v.
        """
        per_number = self.layout.dtype.itemsize
        strip_bytes = sum(strip.numbers_per_token for strip in strips) * per_number
        base = self.layout.base_bytes_per_token
        widths = [base // (2 * self.layout.num_layers)]
        widths += [strip.widest * per_number for strip in strips]
        copied_tensor = self.rounded(tokens) * max(widths)
        held = self.rounded(tokens) * (base + strip_bytes) + self.rounded(private) * base
        return held + copied_tensor

    def rounded(self, tokens: int) -> int:
        """Tokens rounded up to whole growth steps.

        A growth copies everything, so the step doubles with the length: it stays within 1/64 and 1/32 of a long
        trajectory, and what is copied altogether stays in proportion to the length.
        """
        step = self.growth_tokens
        while tokens >= 2 * LEAST_STEPS * step:
            step *= 2
        return -(-tokens // step) * step

    def reserve(
        self, trajectory: Trajectory, tokens: int, strips: Sequence[StripLayout], private: int = 0
    ) -> None:
        """Make room for ``tokens`` tokens and these strips, evicting idle trajectories, the least recently used first.

        ``private`` rows of a turn's own k and v are opened too, counted from the trajectory's present length (or from
        where they were opened). Raises CacheBudgetError, with nothing changed but evictions, if running turns leave no
        room.
        """
        capacity = max(self.rounded(tokens), trajectory.capacity)
        new_strips = [strip for strip in strips if strip.key not in trajectory.strips]
        held_private = trajectory.private.capacity if trajectory.private is not None else 0
        if capacity == trajectory.capacity and not new_strips and private <= held_private:
            return
        per_number = self.layout.dtype.itemsize
        needed = trajectory.growth_bytes(capacity)
        needed += sum(strip.numbers_per_token for strip in new_strips) * capacity * per_number
        needed += max(0, self.rounded(private) - held_private) * self.layout.base_bytes_per_token
        # Tensors grow one after the other: only the largest one exists twice at any time.
        copied = [trajectory.copied_bytes(capacity)]
        if trajectory.private is not None and private > held_private:
            copied.append(trajectory.private.k[0].nbytes)
        self._make_room(needed + max(copied), keep=trajectory)
        trajectory.grow(capacity)
        for strip in strips:
            trajectory.add_strip(strip)
        if private:
            trajectory.open_private(self.rounded(private))
        self.peak_bytes = max(self.peak_bytes, self.bytes_held())

    def _make_room(self, needed: int, keep: Trajectory) -> None:
        if needed == 0:
            return
        while (held := self.bytes_held()) + needed > self.budget:
            idle = [item for item in self.trajectories if not item.busy and item is not keep]
            if not idle:
                raise CacheBudgetError(held + needed, self.budget, held)
            self.evict(min(idle, key=lambda item: item.last_used))

    def evict(self, trajectory: Trajectory) -> None:
        """Drop an idle trajectory for want of room."""
        self._remember_lost(trajectory, Lookup.EVICTED)
        self.evictions += 1
        self.trajectories.remove(trajectory)

    def clear(self) -> None:
        """Drop every trajectory that no running turn uses."""
        self.trajectories = [item for item in self.trajectories if item.busy]
        self._lost.clear()

    # -- adapters that come and go -------------------------------------------------------------------------------

    def keep_only(self, kept: Kept) -> None:
        """Drop what the loaded adapters do not allow any more; what running turns use goes when they are done."""
        self._kept = kept
        self._prune()

    def _prune(self) -> None:
        kept = self._kept
        if kept is None:
            return
        for trajectory in [item for item in self.trajectories if not item.busy]:
            usable = self._usable(trajectory)
            for key in set(trajectory.strips) - kept.strips:
                del trajectory.strips[key]
            if usable < trajectory.length or trajectory.namespace not in kept.namespaces:
                self._remember_lost(trajectory, Lookup.ADAPTER_CHANGED)
                trajectory.truncate(usable)
            if trajectory.length == 0 or trajectory.namespace not in kept.namespaces:
                self.trajectories.remove(trajectory)

    def _usable(self, trajectory: Trajectory) -> int:
        """Tokens before the first one of a stale writer: what follows it was computed on top of it.

        A reader whose strip is not kept any more was a writer of the rows that its passes wrote.
        """
        kept = self._kept
        if kept is None:
            return trajectory.length
        stale = [run.start for run in trajectory.runs if kept.stale(run.writer)]
        stale += [
            strip.covered[0][0]
            for key, strip in trajectory.strips.items()
            if key not in kept.strips and strip.layout.in_base and strip.covered
        ]
        return min(stale, default=trajectory.length)


def common_prefix(cached: TokenArray, prompt: TokenArray) -> int:
    """Length of the longest common prefix of two token id arrays."""
    shorter = min(len(cached), len(prompt))
    differs = cached[:shorter] != prompt[:shorter]
    first = int(differs.argmax()) if shorter else 0
    return first if shorter and differs[first] else shorter


def _forks(source: Trajectory, matched: int) -> bool:
    tail = source.length - matched
    return source.busy > 0 or tail > max(FORK_MIN_TAIL, FORK_TAIL_SHARE * matched)
