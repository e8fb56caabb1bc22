"""Does the neutral-base condition say which policy a reader does better with? Held against the measured KL."""

from __future__ import annotations

from dataclasses import dataclass

from precache.fidelity.intervals import Interval
from precache.fidelity.layers import LayerPicture
from precache.fidelity.summary import Summary

WRITERS_BASE, NEUTRAL_BASE = "prelrshared", "rebaseshared"


@dataclass(frozen=True)
class Prediction:
    """One reader. ``neutral_share`` is the part of (layer, token of another role) where the condition holds.

    ``expected`` is the policy that this favours. ``measured`` is the one with the lower KL for this reader, None if the
    interval of ``difference`` (prelrshared minus rebaseshared, nats per token) holds zero. The condition looks at what
    others wrote; that the reader loses its own exact cache under rebaseshared is not in it.
    """

    reader: str
    neutral_share: float
    expected: str
    measured: str | None
    difference: Interval


def predict(picture: LayerPicture, summary: Summary) -> list[Prediction]:
    """For every reader; nothing unless both policies were compared."""
    if not {WRITERS_BASE, NEUTRAL_BASE} <= set(summary.policies):
        return []
    pairs = picture.pairs()
    readers = [role for role in summary.roles if any(pair.reader == role for pair in pairs)]
    return [_predict(picture, summary, reader) for reader in readers]


def _predict(picture: LayerPicture, summary: Summary, reader: str) -> Prediction:
    pairs = [pair for pair in picture.pairs() if pair.reader == reader]
    holds = sum(pair.tokens * pair.expected for pair in pairs)
    share = holds / sum(pair.tokens * pair.layers for pair in pairs)
    difference = summary.kl_difference(WRITERS_BASE, NEUTRAL_BASE, reader)
    better = NEUTRAL_BASE if difference.value > 0 else WRITERS_BASE
    return Prediction(
        reader,
        share,
        NEUTRAL_BASE if share > 0.5 else WRITERS_BASE,
        better if difference.excludes_zero() else None,
        difference,
    )
