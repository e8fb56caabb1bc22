"""Runs a part of the model's layers over tokens that are cached already, and of their rows only some where asked.

This is how a reader refreshes what others wrote: k and v of the chosen layers and rows are replaced by its own, in the
one shared cache. The mask is exact: a row sees the positions up to its own, refreshed or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from precache.adapters.bank import AdapterBank
from precache.cache.trajectory import Trajectory
from precache.engine.forward import Forward, KeyValuesStored, Lane, Watch
from precache.engine.model import BackboneModel
from precache.engine.policies.base import Candidates, LayerGroup, PassSpec, Selection
from precache.engine.work import Work


class PartialPass:
    """A pass with a group over cached positions (int64, ascending, on the CPU), in chunks of ``chunk`` rows.

    ``before_chunk`` is called before anything of a chunk runs, and may raise to stop. ``work`` counts.
    """

    def __init__(
        self,
        model: BackboneModel,
        bank: AdapterBank,
        trajectory: Trajectory,
        spec: PassSpec,
        chunk: int,
        work: Work,
        before_chunk: Callable[[], None],
    ) -> None:
        assert spec.group is not None
        self._model = model
        self._bank = bank
        self._trajectory = trajectory
        self._spec = spec
        self._group: LayerGroup = spec.group
        self._chunk = chunk
        self._work = work
        self._before_chunk = before_chunk

    def refresh(self, gaps: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
        """Run over the positions of ``gaps`` and yield those of every part that is done and recorded.

        A part is a chunk, or all of them where rows are chosen. If one fails, its rows are dropped with all that
        follows: some of them would be refreshed in some layers only.
        """
        if not gaps:
            return
        positions = torch.cat([torch.arange(low, high) for low, high in gaps])
        whole = self._group.selection is not None
        for part in torch.split(positions, len(positions) if whole else self._chunk):
            written = self._work.kv_entries
            try:
                self._run(part)
            except BaseException:
                if self._work.kv_entries > written:
                    self._trajectory.truncate(int(part[0]))
                raise
            self._record(part)
            yield part

    def _record(self, positions: Tensor) -> None:
        """The reader's pass has been over these positions; with ``displaces``, the others' have not any more."""
        (own,) = self._spec.strips
        breaks = torch.nonzero(positions.diff() > 1).flatten().add(1).tolist()
        for run in torch.tensor_split(positions, breaks):
            low, high = int(run[0]), int(run[-1]) + 1
            for key, strip in self._trajectory.strips.items():
                if key == own.layout.key:
                    strip.cover(low, high)
                elif self._spec.displaces and strip.layout.in_base:
                    strip.uncover(low, high)

    @torch.inference_mode()
    def _run(self, positions: Tensor) -> None:
        group = self._group
        if group.selection is None:
            self._before_chunk()
            lane = self._lane(positions)
            self._finish(lane, self._entering(lane), group.first)
            return
        chosen, hidden_states = self._select(positions, group.selection)
        for part in torch.split(torch.arange(len(chosen)), self._chunk):
            if len(part):
                self._before_chunk()
                self._finish(self._lane(chosen[part]), hidden_states[part], group.selection.layer)

    def _select(self, positions: Tensor, selection: Selection) -> tuple[Tensor, Tensor]:
        """Run all rows up to the layer of the selection, which sees them all before it chooses.

        Returns the chosen positions and the hidden states [chosen, hidden] that enter that layer.
        """
        watch = _watch(positions, selection, self._model.device)
        entering, fresh = [], []
        for part in torch.split(positions, self._chunk):
            self._before_chunk()
            lane = self._lane(part, watch)
            layers = range(self._group.first, selection.layer)
            hidden_states = self._through(lane, self._entering(lane), layers)
            entering.append(hidden_states)
            fresh.append(self._values(lane, hidden_states, selection.layer))
        cached = self._trajectory.base.v[selection.layer][:, positions]
        candidates = Candidates(
            positions,
            fresh=torch.cat(fresh),
            cached=cached.transpose(0, 1).flatten(1),
            attention=watch.total[positions],
        )
        kept = selection.choose(candidates).cpu()
        return positions[kept], torch.cat(entering)[kept]

    # -- a few layers over one lane; hidden states are [rows, hidden] ----------------------------------------------

    def _lane(self, positions: Tensor, watch: Watch | None = None) -> Lane:
        first, last = int(positions[0]), int(positions[-1])
        consecutive = last - first + 1 == len(positions)
        return Lane(
            self._trajectory.token_ids[positions.numpy()].tolist(),
            first,
            self._spec,
            self._trajectory,
            scattered=None if consecutive else positions,
            watch=watch,
        )

    def _entering(self, lane: Lane) -> Tensor:
        """What enters the group's first layer: the embeddings, or the hidden states that the writer kept."""
        if self._group.first == 0:
            return self._model.embed(self._start(lane))[0]
        for strip in self._trajectory.strips.values():
            stored = strip.hidden[self._group.first] if strip.hidden else None
            if stored is not None:
                return stored[lane.index]
        raise AssertionError(f"nothing keeps the hidden states of layer {self._group.first}")

    def _through(self, lane: Lane, hidden_states: Tensor, layers: range) -> Tensor:
        forward, states = self._start(lane), hidden_states[None]
        rope = self._model.rope(states, forward)
        with self._model.running(forward):
            for layer in layers:
                states = self._model.run_layer(layer, states, rope, forward)
        return states[0]

    def _finish(self, lane: Lane, hidden_states: Tensor, first: int) -> None:
        """From layer ``first`` on; of the group's last one only k and v."""
        states = self._through(lane, hidden_states, range(first, self._group.last))[None]
        forward = self._start(lane, keys_values_only=True)
        rope = self._model.rope(states, forward)
        with self._model.running(forward), suppress(KeyValuesStored):
            self._model.run_layer(self._group.last, states, rope, forward)

    def _values(self, lane: Lane, hidden_states: Tensor, layer: int) -> Tensor:
        """The pass's own values at a layer, [rows, num_kv_heads * head_dim]; nothing is stored."""
        forward = self._start(lane)
        with self._model.running(forward):
            return self._model.values(layer, hidden_states[None])[0]

    def _start(self, lane: Lane, *, keys_values_only: bool = False) -> Forward:
        return self._model.start([lane], self._bank, self._work, keys_values_only=keys_values_only)


def _watch(positions: Tensor, selection: Selection, device: torch.device) -> Watch:
    end = int(positions[-1]) + 1
    watched = positions[len(positions) - min(selection.suffix, len(positions)) :]
    first = int(watched[0]) if len(watched) else end
    return Watch(first, torch.zeros(end, device=device))
