"""Which base is closer to what a reader would have computed itself, layer by layer: the writer's or the neutral one?

For tokens that a writer wrote, with hidden states h of the writer (as cached), the reader (its own pass) and the
neutral pass, the offsets are writer - neutral and reader - neutral. The neutral base is closer to the reader exactly if
rho = |writer offset| / |reader offset| >= 2 cos(theta), theta the angle between them (PReCache 2026, appendix). For the
hidden states that is geometry. Whether it predicts which k and which v_base is closer is measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from precache import Engine
from precache.fidelity.capture import SPLIT, States, own_states, shared_states
from precache.fidelity.intervals import Interval, Resampling
from precache.fidelity.recordings import Progress, Recording, check_recordings

NEUTRAL = "base"
PARTS = ("hidden", "k", "v_base")


@dataclass(frozen=True)
class Pair:
    """Tokens that ``writer`` wrote and ``reader`` reads."""

    writer: str
    reader: str


@dataclass(frozen=True)
class Errors:
    """|cached - reader's| / |reader's| over all tokens, cached by the writer or by the neutral pass.

    ``ratio`` is the first over the second: above 1 the neutral one is closer.
    """

    writer: float
    neutral: float
    ratio: float


@dataclass(frozen=True)
class LayerRow:
    """One layer and pair. ``rho`` and ``cosine`` are of the offsets; ``neutral_expected``: rho >= 2 cosine."""

    layer: int
    writer: str
    reader: str
    tokens: int
    hidden: Errors
    k: Errors
    v_base: Errors
    rho: float
    cosine: float
    neutral_expected: bool


@dataclass(frozen=True)
class PairRow:
    """One pair over the ``layers`` whose inputs differ at all; ratios have 95 % intervals over trajectories.

    ``expected`` counts the layers where the condition holds, ``k_right`` and ``v_base_right`` those where it names the
    base that is in fact closer.
    """

    writer: str
    reader: str
    tokens: int
    layers: int
    hidden_ratio: Interval
    k_ratio: Interval
    v_base_ratio: Interval
    expected: int
    k_right: int
    v_base_right: int


@dataclass(frozen=True)
class _Sums:
    """Squared norms by trajectory and layer, [trajectories, layers] each; ``dot`` is of the two offsets."""

    reader: Mapping[str, NDArray[np.float64]]
    from_writer: Mapping[str, NDArray[np.float64]]
    from_neutral: Mapping[str, NDArray[np.float64]]
    writer_offset: NDArray[np.float64]
    dot: NDArray[np.float64]
    tokens: NDArray[np.int64]  # [trajectories]


class LayerPicture:
    """The figures of every layer and pair that the recordings have."""

    def __init__(self, sums: Mapping[Pair, _Sums], num_trajectories: int, seed: int = 0) -> None:
        self._sums = sums
        self._resampling = Resampling(num_trajectories, seed)

    def rows(self) -> list[LayerRow]:
        return [row for pair in self._sums for row in self._rows_of(pair)]

    def pairs(self) -> list[PairRow]:
        return [self._pair_row(pair) for pair in self._sums]

    def _rows_of(self, pair: Pair) -> Iterator[LayerRow]:
        sums = self._sums[pair]
        writer_offset, dot = sums.writer_offset.sum(0), sums.dot.sum(0)
        reader_offset = sums.from_neutral["hidden"].sum(0)
        for layer in range(len(dot)):
            rho = _root_ratio(writer_offset[layer], reader_offset[layer])
            lengths = math.sqrt(writer_offset[layer] * reader_offset[layer])
            cosine = float(dot[layer] / lengths) if lengths else 0.0
            yield LayerRow(
                layer,
                pair.writer,
                pair.reader,
                int(sums.tokens.sum()),
                _errors(sums, "hidden", layer),
                _errors(sums, "k", layer),
                _errors(sums, "v_base", layer),
                rho,
                cosine,
                rho >= 2 * cosine,
            )

    def _pair_row(self, pair: Pair) -> PairRow:
        sums = self._sums[pair]
        rows = [row for row in self._rows_of(pair) if row.hidden.neutral > 0]
        return PairRow(
            pair.writer,
            pair.reader,
            int(sums.tokens.sum()),
            len(rows),
            hidden_ratio=self._ratio(sums, "hidden"),
            k_ratio=self._ratio(sums, "k"),
            v_base_ratio=self._ratio(sums, "v_base"),
            expected=sum(row.neutral_expected for row in rows),
            k_right=sum(row.neutral_expected == (row.k.ratio >= 1) for row in rows),
            v_base_right=sum(row.neutral_expected == (row.v_base.ratio >= 1) for row in rows),
        )

    def _ratio(self, sums: _Sums, part: str) -> Interval:
        """Over all layers, each layer's errors relative to the reader's states in it."""
        scale = sums.reader[part].sum(0)
        top = (sums.from_writer[part] / scale).sum(1)
        bottom = (sums.from_neutral[part] / scale).sum(1)
        found = self._resampling.mean(top, bottom)
        ends = [None if end is None else math.sqrt(end) for end in (found.low, found.high)]
        return Interval(math.sqrt(found.value), *ends)


def layer_picture(
    engine: Engine, recordings: Sequence[Recording], progress: Progress = iter, seed: int = 0
) -> LayerPicture:
    """Measure every pair of a writer and another role that reads. The engine gives model and adapters.

    Raises FidelityError for recordings that cannot be replayed.
    """
    check_recordings(recordings, engine.agents(), engine.context_window)
    roles = tuple(dict.fromkeys(role for item in recordings for role in item.roles))
    found: dict[Pair, list[_Sums]] = {}
    with engine.with_policy(SPLIT) as split:
        for recording in progress(recordings):
            shared, neutral = shared_states(split, recording), own_states(split, recording, NEUTRAL)
            for reader in roles:
                own = own_states(split, recording, reader)
                for writer in roles:
                    if writer != reader:
                        sums = _sums(writer, shared, neutral, own)
                        found.setdefault(Pair(writer, reader), []).append(sums)
            split.reset()
    joined = {pair: _join(parts) for pair, parts in found.items()}
    written = {pair: sums for pair, sums in joined.items() if sums.tokens.sum()}
    return LayerPicture(written, len(recordings), seed)


def _sums(writer: str, shared: States, neutral: States, own: States) -> _Sums:
    rows = [position for position, name in enumerate(shared.writers) if name == writer]

    def by_layer(norm: Callable[[int], float]) -> NDArray[np.float64]:
        return np.array([[norm(layer) for layer in range(len(own.hidden))]])

    def squares(part: str, first: States, second: States | None) -> NDArray[np.float64]:
        ones, others = getattr(first, part), None if second is None else getattr(second, part)
        return by_layer(
            lambda i: _square(ones[i][rows] - (0 if others is None else others[i][rows]))
        )

    def dot(layer: int) -> float:
        base = neutral.hidden[layer][rows]
        offsets = (shared.hidden[layer][rows] - base) * (own.hidden[layer][rows] - base)
        return float(offsets.double().sum())

    return _Sums(
        reader={part: squares(part, own, None) for part in PARTS},
        from_writer={part: squares(part, shared, own) for part in PARTS},
        from_neutral={part: squares(part, neutral, own) for part in PARTS},
        writer_offset=squares("hidden", shared, neutral),
        dot=by_layer(dot),
        tokens=np.array([len(rows)]),
    )


def _join(parts: Sequence[_Sums]) -> _Sums:
    def by_part(name: str) -> dict[str, NDArray[np.float64]]:
        return {
            part: np.concatenate([getattr(sums, name)[part] for sums in parts]) for part in PARTS
        }

    return _Sums(
        by_part("reader"),
        by_part("from_writer"),
        by_part("from_neutral"),
        np.concatenate([sums.writer_offset for sums in parts]),
        np.concatenate([sums.dot for sums in parts]),
        np.concatenate([sums.tokens for sums in parts]),
    )


def _errors(sums: _Sums, part: str, layer: int) -> Errors:
    reader = sums.reader[part][:, layer].sum()
    writer = sums.from_writer[part][:, layer].sum()
    neutral = sums.from_neutral[part][:, layer].sum()
    return Errors(
        _root_ratio(writer, reader), _root_ratio(neutral, reader), _root_ratio(writer, neutral)
    )


def _root_ratio(top: float, bottom: float) -> float:
    """sqrt(top / bottom); 1 where both are nothing, as at the first layer, which every pass enters alike."""
    return math.sqrt(top / bottom) if bottom else 1.0


def _square(tensor: Tensor) -> float:
    return float(tensor.double().square().sum())
