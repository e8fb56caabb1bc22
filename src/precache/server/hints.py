"""Finds agents whose prompts hold the same text but cannot share it, because they differ near the front.

A role text or a clock in front of the common history makes every later token miss the cache, and nothing fails: it is
only slow. So it is said, once for each pair of agents and place.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from precache.chat import ChatTokenizer

MIN_TOKENS = 32  # shorter prompts are cheap anyway
MAX_AGENTS = 16
_GRAM = 12  # tokens; two texts that have a run of so many in common hold the same text
_EARLY_SHARE = 0.5  # a common prefix below this part of the common text is early


@dataclass(frozen=True)
class Hint:
    """The prompts of two agents stop sharing at token ``position``, though ``common_tokens`` of text are the same."""

    first_model: str
    second_model: str
    position: int
    common_tokens: int
    before: str
    first: str
    second: str

    def __str__(self) -> str:
        return (
            f"{self.first_model!r} and {self.second_model!r} cannot share their history: about {self.common_tokens} "
            f"tokens of it are the same, but the prompts differ from token {self.position} on; after {self.before!r} "
            f"one goes on with {self.first!r}, the other with {self.second!r}. Put the text of the role last."
        )


@dataclass(frozen=True)
class _Seen:
    model: str
    token_ids: list[int]
    grams: frozenset[int]  # hashes


class HintFinder:
    """Compares each prompt with the last one of every other agent."""

    def __init__(self, tokenizer: ChatTokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._last: OrderedDict[str, _Seen] = OrderedDict()
        self._told: set[tuple[str, str, int]] = set()

    def look(self, agent: str, model: str, prompt: Sequence[int]) -> Hint | None:
        """Remember a prompt; return a hint if it holds what another agent's holds and cannot share it."""
        if self._tokenizer is None or len(prompt) < MIN_TOKENS:
            return None
        seen = _Seen(model, list(prompt), _grams(prompt))
        own = self._last.get(agent)
        others = [other for name, other in self._last.items() if name != agent]
        shares = any(_share(other, seen) for other in others)
        hints = [] if shares else [self._compare(other, seen, own) for other in others]
        self._last[agent] = seen
        self._last.move_to_end(agent)
        if len(self._last) > MAX_AGENTS:
            self._last.popitem(last=False)
        return next((hint for hint in hints if hint is not None), None)

    def _compare(self, first: _Seen, second: _Seen, own: _Seen | None) -> Hint | None:
        """``own`` is what the second agent asked before: if that differs here too, it is another task, not its role."""
        common = len(first.grams & second.grams)
        if common + _GRAM < MIN_TOKENS:
            return None
        assert self._tokenizer is not None
        found = self._tokenizer.find_divergence(first.token_ids, second.token_ids)
        if found is None or found.position >= _EARLY_SHARE * common:
            return None
        if (
            own is not None
            and own.token_ids[: found.position + 1] != second.token_ids[: found.position + 1]
        ):
            return None
        key = (*sorted((first.model, second.model)), found.position)
        if key in self._told or len(self._told) > 1000:
            return None
        self._told.add(key)  # type: ignore[arg-type]
        return Hint(
            first.model,
            second.model,
            found.position,
            common + _GRAM - 1,
            found.before,
            found.first,
            found.second,
        )


def _share(first: _Seen, second: _Seen) -> bool:
    """Whether the prompts begin with the same text for half the length of the shorter one."""
    half = round(_EARLY_SHARE * min(len(first.token_ids), len(second.token_ids)))
    return first.token_ids[:half] == second.token_ids[:half]


def _grams(prompt: Sequence[int]) -> frozenset[int]:
    """Hashes: the runs themselves would take several times the memory, for every token of 16 prompts."""
    return frozenset(
        hash(tuple(prompt[start : start + _GRAM])) for start in range(len(prompt) - _GRAM + 1)
    )
