"""The engine's lock: taken in the order of asking, so that a turn which runs pass after pass lets others in between."""

from __future__ import annotations

from collections import deque
from threading import Event, Lock, get_ident
from types import TracebackType


class FairLock:
    """A re-entrant lock for ``with``. Python's own may be taken back by the thread that just released it, for ever."""

    def __init__(self) -> None:
        self._mutex = Lock()
        self._owner: int | None = None
        self._depth = 0
        self._waiting: deque[tuple[int, Event]] = deque()

    @property
    def waiting(self) -> int:
        """Threads that wait for it now."""
        return len(self._waiting)

    def __enter__(self) -> None:
        me = get_ident()
        with self._mutex:
            if self._owner in (None, me):
                self._owner = me
                self._depth += 1
                return
            turn = (me, Event())
            self._waiting.append(turn)
        try:
            turn[1].wait()
        except (
            BaseException
        ):  # Ctrl-C while waiting: step out of the queue, or hand on what was handed over
            with self._mutex:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                else:
                    self._hand_on()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._mutex:
            self._depth -= 1
            if self._depth == 0:
                self._hand_on()

    def _hand_on(self) -> None:
        if self._waiting:
            self._owner, handed_over = self._waiting.popleft()
            self._depth = 1
            handed_over.set()
        else:
            self._owner, self._depth = None, 0
