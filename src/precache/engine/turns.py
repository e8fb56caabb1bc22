"""Runs turns on token ids: reuse, catch-up, prefill in chunks, decode, and the deferred pass.

Every method runs at most one forward pass at a time and commits what it wrote only when the pass is through, so a turn
that fails or is dropped leaves a valid, possibly shorter, prefix. The caller holds the engine's lock.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from threading import Event

import torch
from torch import Tensor

from precache.adapters.bank import BASE_NAME, Adapter, AdapterBank
from precache.cache.layout import StripLayout
from precache.cache.store import TrajectoryStore
from precache.cache.trajectory import Trajectory, Writer
from precache.engine.forward import Lane
from precache.engine.model import BackboneModel
from precache.engine.partial import PartialPass
from precache.engine.policies import SharingPolicy
from precache.engine.policies.base import PassSpec, TurnPlan
from precache.engine.work import Work
from precache.errors import CacheBudgetError, NonFiniteLogitsError, TurnCancelledError

RESERVE_AHEAD = 128  # tokens for which room is made before the first one is generated


@dataclass
class Turn:
    """One agent's request while it runs. ``matched`` of the prompt's tokens were reused.

    The turn found the rows below ``untouched`` as they are; those behind hold something of it. ``work`` counts all its
    passes, ``catch_up`` those over tokens that were cached before it.

    Another thread may set ``cancel``; the turn then ends before its next forward pass.
    """

    adapter: Adapter | None
    plan: TurnPlan
    trajectory: Trajectory
    matched: int
    cancel: Event
    shared_tokens: int = 0
    catch_up_tokens: int = 0
    catch_up: Work = field(default_factory=Work)
    work: Work = field(default_factory=Work)
    neutral_tokens: int = 0
    neutral_wait_s: float = 0.0
    neutral_s: float = 0.0

    def __post_init__(self) -> None:
        self.untouched = self.matched

    @property
    def writer(self) -> Writer:
        if self.adapter is None:
            return Writer(BASE_NAME, "")
        return Writer(self.adapter.name, self.adapter.digest)

    def check_cancel(self) -> None:
        """Raise TurnCancelledError if somebody wants the turn to end."""
        if self.cancel.is_set():
            raise TurnCancelledError


class TurnRunner:
    """Carries out a policy's passes over one model, one bank of adapters and one store."""

    def __init__(
        self,
        model: BackboneModel,
        bank: AdapterBank,
        store: TrajectoryStore,
        policy: SharingPolicy,
        prefill_chunk: int,
    ) -> None:
        self.model = model
        self.bank = bank
        self.store = store
        self.policy = policy
        self.prefill_chunk = prefill_chunk
        self.neutral_tokens = 0  # run with adapters off so far, for all turns
        self.work = Work()  # of all passes so far
        self.catch_up = Work()  # of those over cached tokens for their reader's sake

    # -- the life of a turn --------------------------------------------------------------------------------------

    def room(self, adapter: Adapter | None) -> int:
        """Most tokens, prompt and output together, that the memory budget can hold for one turn of the agent."""
        low, high = 0, self.model.context_window
        while low < high:
            middle = (low + high + 1) // 2
            fits = self._bytes_needed(adapter, middle) <= self.store.budget
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def check_budget(self, adapter: Adapter | None, tokens: int) -> None:
        """Raise CacheBudgetError if a turn that ends at ``tokens`` tokens cannot fit even into an empty store."""
        needed = self._bytes_needed(adapter, tokens)
        if needed > self.store.budget:
            raise CacheBudgetError(needed, self.store.budget)

    def _bytes_needed(self, adapter: Adapter | None, tokens: int) -> int:
        plan = self.policy.turn(adapter, self.bank)
        private = tokens if plan.beside is not None else 0
        return self.store.bytes_needed(tokens, self._layouts(), private)

    def begin(
        self,
        adapter: Adapter | None,
        prompt: Sequence[int],
        output_tokens: int,
        cancel: Event | None = None,
    ) -> Turn:
        """Find what can be reused and bring it up to date for this agent.

        Raises CacheBudgetError, and TurnCancelledError once ``cancel`` is set.

        Nothing of the prompt's own tokens has run when this returns; ``extend`` runs them.
        """
        trajectory, matched = self.store.checkout(prompt, self.policy.namespace(adapter))
        plan = self.policy.turn(adapter, self.bank)
        turn = Turn(adapter, plan, trajectory, matched, cancel or Event())
        turn.shared_tokens = _written_by_others(trajectory, matched, turn.writer)
        try:
            self._reserve(turn, len(prompt) + min(output_tokens - 1, RESERVE_AHEAD))
            started = time.perf_counter()
            while self.run_deferred(trajectory, max_chunks=1):
                turn.check_cancel()
            turn.neutral_wait_s = time.perf_counter() - started
            self._catch_up(turn)
            if turn.plan.deferred:
                trajectory.pending_from = matched
        except BaseException:
            self.store.release(trajectory)
            raise
        return turn

    def extend(self, turn: Turn, token_ids: Sequence[int], logits_from: int) -> Tensor:
        """Run tokens behind those cached, in chunks, and return the logits of the last ones, fp32.

        ``logits_from`` is the first position whose logits are wanted; the result is [positions from there, vocab].
        Raises NonFiniteLogitsError (nothing of the turn stays cached), CacheBudgetError and TurnCancelledError.
        """
        collected = []
        for chunk in self.chunks(token_ids):
            turn.check_cancel()
            collected.append(self._extend_chunk(turn, chunk, logits_from))
        logits = collected[0] if len(collected) == 1 else torch.cat(collected)
        if logits.shape[0] and not _all_finite(logits):
            position = turn.trajectory.length - 1
            turn.trajectory.truncate(turn.untouched)
            raise NonFiniteLogitsError(turn.writer.name, position)
        return logits

    def chunks(self, token_ids: Sequence[int]) -> list[Sequence[int]]:
        """The tokens in runs that one forward pass takes."""
        size = self.prefill_chunk
        return [token_ids[first : first + size] for first in range(0, len(token_ids), size)]

    def _extend_chunk(self, turn: Turn, token_ids: Sequence[int], logits_from: int) -> Tensor:
        trajectory, plan = turn.trajectory, turn.plan
        start, end = trajectory.length, trajectory.length + len(token_ids)
        self._reserve(turn, end)
        private = trajectory.private if plan.beside is not None else None
        wanted = min(max(0, end - logits_from), len(token_ids))
        lanes = [Lane(token_ids, start, plan.adapted, trajectory, private, logits=wanted)]
        if plan.beside is not None:
            lanes.append(Lane(token_ids, start, plan.beside, trajectory))
            turn.neutral_tokens += len(token_ids)
            self.neutral_tokens += len(token_ids)
        logits = self._forward(lanes, turn.work)
        trajectory.commit(token_ids, turn.writer)
        for lane in lanes:
            _cover(lane)
        return logits

    def finish(self, turn: Turn) -> None:
        """End a turn: run its deferred pass, unless that waits for an idle moment, and let go of the trajectory."""
        try:
            if turn.plan.deferred and not self.policy.when_idle:
                started = time.perf_counter()
                turn.neutral_tokens += self.run_deferred(turn.trajectory, work=turn.work)
                turn.neutral_s = time.perf_counter() - started
        finally:
            self.store.release(turn.trajectory)

    def abort(self, turn: Turn) -> None:
        """Drop a turn: what it committed stays cached, what it had not is gone."""
        self.store.release(turn.trajectory)

    # -- passes beside the turn's own ----------------------------------------------------------------------------

    def _catch_up(self, turn: Turn) -> None:
        spec = self.policy.catch_up(turn.adapter, self.bank)
        if spec is None:
            return
        (write,) = spec.strips
        gaps = turn.trajectory.strips[write.layout.key].missing(turn.matched)
        try:
            if spec.group is not None:
                self._refresh(turn, spec, gaps)
            else:
                self._fill_strip(turn, spec, gaps)
        finally:
            self.catch_up.add(turn.catch_up)
            turn.work.add(turn.catch_up)

    def _fill_strip(self, turn: Turn, spec: PassSpec, gaps: Sequence[tuple[int, int]]) -> None:
        for low, high in gaps:
            for start in range(low, high, self.prefill_chunk):
                turn.check_cancel()
                end = min(start + self.prefill_chunk, high)
                self._run_cached(turn.trajectory, start, end, spec, turn.catch_up)
                turn.catch_up_tokens += end - start

    def _refresh(self, turn: Turn, spec: PassSpec, gaps: Sequence[tuple[int, int]]) -> None:
        """Replace a part of the cached k and v by the agent's own. If it fails, what it was replacing is dropped."""
        partial = PartialPass(
            self.model,
            self.bank,
            turn.trajectory,
            spec,
            self.prefill_chunk,
            turn.catch_up,
            turn.check_cancel,
        )
        try:
            for part in partial.refresh(gaps):
                turn.untouched = min(turn.untouched, int(part[0]))
                turn.catch_up_tokens += len(part)
        finally:
            self.work.add(turn.catch_up)

    def run_deferred(
        self, trajectory: Trajectory, max_chunks: int | None = None, work: Work | None = None
    ) -> int:
        """Run the deferred pass over what awaits it, at most ``max_chunks`` chunks; returns the tokens run.

        If a pass fails the rows it was replacing are dropped with all that follows, and the error goes on.
        """
        done = chunks = 0
        while (start := trajectory.pending_from) is not None and chunks != max_chunks:
            end = min(start + self.prefill_chunk, trajectory.length)
            if start < end:
                self._replace_rows(trajectory, start, end, work or Work())
            trajectory.pending_from = end if end < trajectory.length else None
            done += end - start
            chunks += 1
        self.neutral_tokens += done
        return done

    def _replace_rows(self, trajectory: Trajectory, start: int, end: int, work: Work) -> None:
        spec = self.policy.deferred(self.bank)
        assert spec is not None, f"{self.policy.name} left tokens pending but has no deferred pass"
        self.store.reserve(trajectory, end, [write.layout for write in spec.strips])
        missing = tuple(
            write
            for write in spec.strips
            if any(low < end and high > start for low, high in _gaps(trajectory, write.layout, end))
        )
        try:
            self._run_cached(trajectory, start, end, replace(spec, strips=missing), work)
        except BaseException:
            trajectory.truncate(start)
            raise

    def _run_cached(
        self, trajectory: Trajectory, start: int, end: int, spec: PassSpec, work: Work
    ) -> None:
        """One pass over tokens that are cached already, for what it writes."""
        token_ids = trajectory.token_ids[start:end].tolist()
        lane = Lane(token_ids, start, spec, trajectory)
        self._forward([lane], work)
        _cover(lane)

    def _forward(self, lanes: Sequence[Lane], work: Work) -> Tensor:
        """One pass of the model, counted in ``work`` and in the sum over all turns."""
        spent = Work()
        try:
            return self.model.forward(lanes, self.bank, spent)
        finally:
            work.add(spent)
            self.work.add(spent)

    # -- room ----------------------------------------------------------------------------------------------------

    def _layouts(self) -> list[StripLayout]:
        return [write.layout for write in self.policy.strips(self.bank)]

    def _reserve(self, turn: Turn, tokens: int) -> None:
        private = tokens - turn.matched if turn.plan.beside is not None else 0
        self.store.reserve(turn.trajectory, tokens, self._layouts(), private)


def _cover(lane: Lane) -> None:
    for write in lane.spec.strips:
        lane.trajectory.strips[write.layout.key].cover(lane.start, lane.end)


def _all_finite(logits: Tensor) -> bool:
    """NaN and infinities reach the extremes, and these take no temporary tensor of the vocabulary's size."""
    low, high = torch.aminmax(logits)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _written_by_others(trajectory: Trajectory, matched: int, reader: Writer) -> int:
    runs = [run for run in trajectory.runs if run.writer.name != reader.name]
    return sum(max(0, min(run.end, matched) - run.start) for run in runs)


def _gaps(trajectory: Trajectory, layout: StripLayout, end: int) -> list[tuple[int, int]]:
    return trajectory.strips[layout.key].missing(end)
