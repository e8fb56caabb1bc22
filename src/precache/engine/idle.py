"""A background thread that does deferred work while nobody wants the engine, one chunk at a time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

_log = logging.getLogger(__name__)


class IdleWorker:
    """Calls ``step`` until it returns False, after every request and while none holds it off.

    A step that raises ends this round with a logged error: the engine has dropped the rows concerned, and the next
    request computes them again.
    """

    def __init__(self, step: Callable[[], bool]) -> None:
        self._step = step
        self._condition = threading.Condition()
        self._holders = 0
        self._work = False
        self._stopped = False
        self._thread = threading.Thread(target=self._loop, name="precache-idle", daemon=True)
        self._thread.start()

    @property
    def held(self) -> bool:
        """Whether a request is here."""
        return self._holders > 0

    def hold(self) -> None:
        """A request came: no new step until ``unhold``."""
        with self._condition:
            self._holders += 1

    def unhold(self) -> None:
        """The request is over, however it ended: it may have left work."""
        with self._condition:
            self._holders -= 1
            self._work = True
            self._condition.notify()

    def stop(self) -> None:
        """End the thread, after the step that is running."""
        with self._condition:
            self._stopped = True
            self._condition.notify()
        self._thread.join()

    def _loop(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(
                    lambda: self._stopped or (self._work and not self._holders)
                )
                if self._stopped:
                    return
                self._work = False  # a request that ends from now on sets it again
            try:
                more = self._step()
            except Exception:
                _log.exception("the deferred pass failed; the rows concerned were dropped")
                more = False
            with self._condition:
                self._work = self._work or more
