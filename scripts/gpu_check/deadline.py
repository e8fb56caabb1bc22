"""How much of the time is left."""

from __future__ import annotations

import time


class Deadline:
    """Some seconds, counted from now."""

    def __init__(self, seconds: float) -> None:
        self._start = time.monotonic()
        self._seconds = seconds

    def passed(self) -> float:
        return time.monotonic() - self._start

    def left(self) -> float:
        return self._seconds - self.passed()
