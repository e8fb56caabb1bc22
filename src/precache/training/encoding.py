"""Trajectory -> token ids, and which of them each role is trained to write.

Owns the rule for the borders: a token belongs to a role if all its characters do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from precache.tasks import Span, Trajectory
from precache.training.errors import TrainingDataError


class OffsetEncoding(Protocol):
    """What `Tokenizer.encode` of the package `tokenizers` returns, as far as we use it."""

    @property
    def ids(self) -> list[int]: ...
    @property
    def offsets(self) -> list[tuple[int, int]]: ...


class OffsetTokenizer(Protocol):
    """A tokenizer that knows its offsets: `tokenizers.Tokenizer` (a fast one's backend)."""

    def encode(self, sequence: str) -> OffsetEncoding: ...


@dataclass(frozen=True, slots=True)
class Encoded:
    """One trajectory as token ids.

    `targets[role]` are the positions (in `input_ids`, ascending, never 0) of the tokens that the
    role wrote; the logits that predict position t are those at t - 1.
    """

    input_ids: tuple[int, ...]
    targets: dict[str, tuple[int, ...]]

    def only(self, role: str) -> Encoded:
        """Return this trajectory for one role, without the tokens after its last target."""
        positions = self.targets[role]
        return Encoded(self.input_ids[: positions[-1] + 1], {role: positions})


def encode(
    trajectory: Trajectory, roles: Iterable[str], tokenizer: OffsetTokenizer, max_tokens: int
) -> Encoded:
    """Encode the whole text once; roles without a complete turn in `max_tokens` get no targets.

    A turn that does not end within `max_tokens` is not trained on at all: half a turn would
    teach the role to stop in the middle.
    """
    encoding = tokenizer.encode(trajectory.text)
    offsets = encoding.offsets
    targets = {role: _positions(trajectory.spans(role), offsets, max_tokens) for role in roles}
    found = {role: positions for role, positions in targets.items() if positions}
    length = 1 + max((positions[-1] for positions in found.values()), default=-1)
    return Encoded(tuple(encoding.ids[:length]), found)


def encode_all(
    trajectories: Sequence[Trajectory],
    roles: Sequence[str],
    tokenizer: OffsetTokenizer,
    max_tokens: int,
) -> list[Encoded]:
    """Encode trajectories, leaving out those in which none of the roles has a turn.

    Raises `TrainingDataError` naming a role that writes nothing in any of them.
    """
    encoded = [encode(t, roles, tokenizer, max_tokens) for t in trajectories]
    for role in roles:
        if not any(role in example.targets for example in encoded):
            known = sorted({name for t in trajectories for name in t.roles})
            raise TrainingDataError(
                f"role {role!r} has no complete turn within max_tokens={max_tokens} in "
                f"{len(trajectories)} trajectories; roles that write: {', '.join(known) or 'none'}"
            )
    return [example for example in encoded if example.targets]


def _positions(
    spans: list[Span], offsets: list[tuple[int, int]], max_tokens: int
) -> tuple[int, ...]:
    kept = [span for span in spans if _ends_within(span, offsets, max_tokens)]
    return tuple(
        position
        for position, (start, end) in enumerate(offsets[:max_tokens])
        if position > 0 and start < end and any(s.start <= start and end <= s.end for s in kept)
    )


def _ends_within(span: Span, offsets: list[tuple[int, int]], max_tokens: int) -> bool:
    return all(end <= start or start >= span.end for start, end in offsets[max_tokens:])
