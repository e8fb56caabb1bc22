"""Regular expressions from an adapter's config, applied within a time limit.

PEFT applies them with `re`, which cannot be stopped, and a short pattern can keep it busy for ever. So they run in
`regex`, which can; patterns that mean something else there are refused.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

import regex

from precache.errors import AdapterFormatError

MAX_PATTERN_CHARS = 1000
MAX_REPEATS = 100
MAX_SECONDS = 0.5

_COUNTED = re.compile(r"\{(\d*)(?:,(\d*))?\}")
_READ_DIFFERENTLY = re.compile(r"\{(?!(?:\d+|\d*,\d*)\})|\[:")  # fuzzy matching, POSIX classes
_UNUSABLE = (re.error, regex.error, RecursionError, OverflowError)


class PatternMatcher:
    """Checks and applies the patterns of one adapter config, all of them within `seconds` of processor time.

    Every method raises AdapterFormatError, with the pattern at work, when the time is used up.
    """

    def __init__(self, owner: str = "adapter config", seconds: float = MAX_SECONDS) -> None:
        self._owner = owner
        self._seconds = self._left = seconds

    def problem(self, pattern: str) -> str | None:
        """What keeps a regular expression from being used, or None."""
        if len(pattern) > MAX_PATTERN_CHARS:
            return f"{len(pattern)} characters, allowed are {MAX_PATTERN_CHARS}"
        if differs := _differs(pattern):
            return differs
        with self._on_time(pattern):
            try:
                re.compile(pattern)  # what PEFT would say
                regex.compile(pattern)
            except _UNUSABLE as error:
                return str(error)
        return None

    def match(self, pattern: str, path: str, *, whole: bool = False) -> re.Match[str] | None:
        """`re.match`, or `re.fullmatch` if `whole`."""
        with self._on_time(pattern):
            compiled = regex.compile(pattern)
            apply = compiled.fullmatch if whole else compiled.match
            found: re.Match[str] | None = apply(path, timeout=max(self._left, 1e-6))
        return found

    @contextmanager
    def _on_time(self, pattern: str) -> Iterator[None]:
        started = time.process_time()  # the clock that `regex` measures its timeout with
        try:
            yield
        except TimeoutError:
            self._left = 0.0
        self._left -= time.process_time() - started
        if self._left <= 0:
            raise AdapterFormatError(
                f"{self._owner}: pattern {pattern!r} and those before it took more than "
                f"{self._seconds:g} s of processor time; allowed are patterns that need next to none"
            )


def _differs(pattern: str) -> str | None:
    """Why `regex` cannot stand in for `re` here."""
    bare = re.sub(r"\\.", "", pattern, flags=re.DOTALL)
    if _READ_DIFFERENTLY.search(bare):
        return "'{' is allowed in a repetition only, and '[:' not at all"
    # It writes counted repetitions out while it compiles, which no time limit stops.
    counts = [max(1, int(low or 1), int(high or 1)) for low, high in _COUNTED.findall(bare)]
    if math.prod(counts) > MAX_REPEATS:
        return f"counted repetitions that multiply to more than {MAX_REPEATS}"
    return None
