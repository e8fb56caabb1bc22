"""The bounded queue of turns, and the one thread that runs them in the order of their arrival.

A request hands in *work*: a function that yields events until it is done or cancelled. The event loop reads the events
through a Ticket and never waits for the engine. Nothing here knows what a turn is.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from typing import Generic, TypeVar

from precache.errors import TurnCancelledError
from precache.server.errors import ApiError, OverloadedError

_MAX_RETRY_S = 60

T = TypeVar("T")
Work = Callable[[threading.Event], Generator[T, None, None]]


class _Done:
    """The last event of a ticket whose work is through."""


class Ticket(Generic[T]):
    """One request's work, from the queue to its last event. Read it with ``async for``."""

    def __init__(self, work: Work[T], queue: TurnQueue, timeout_s: float) -> None:
        self.cancelled = threading.Event()
        self.arrived = time.monotonic()
        self.started: float | None = None
        self._work = work
        self._queue = queue
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[T | Exception | _Done] = asyncio.Queue()
        self._timer = self._loop.call_later(timeout_s, self._time_out, timeout_s)

    def __aiter__(self) -> Ticket[T]:
        return self

    async def __anext__(self) -> T:
        """The next event; raises what ended the work."""
        event = await self._events.get()
        if isinstance(event, _Done | Exception):
            self._timer.cancel()
            raise StopAsyncIteration if isinstance(event, _Done) else event
        return event

    def cancel(self, reason: Exception) -> None:
        """End the work before its next forward pass; the reader gets ``reason`` at once. Event loop only."""
        if not self.cancelled.is_set():
            self.cancelled.set()
            self._timer.cancel()
            self._queue.forget(self)
            self._events.put_nowait(reason)

    def run(self) -> None:
        """Do the work, in the queue's thread."""
        self.started = time.monotonic()
        try:
            with closing(self._work(self.cancelled)) as events:
                for event in events:
                    self._put(event)
                    if self.cancelled.is_set():
                        return
            self._put(_Done())
        except TurnCancelledError:
            return  # the reader has its reason
        except Exception as error:
            self._put(error)

    def _time_out(self, timeout_s: float) -> None:
        text = f"the request took longer than {timeout_s:g} s"
        self.cancel(ApiError(504, text, code="request_timeout"))

    def _put(self, event: T | Exception | _Done) -> None:
        with suppress(RuntimeError):  # the event loop is gone, and the reader with it
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)


class TurnQueue:
    """Runs tickets one at a time, first come first served, and refuses what it cannot hold.

    ``busy`` is entered while there is work, so that the engine starts nothing of its own between two turns.
    """

    def __init__(
        self,
        max_waiting: int,
        busy: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.max_waiting = max_waiting
        self.running: Ticket[object] | None = None
        self._busy = busy
        self._waiting: deque[Ticket[object]] = deque()
        self._condition = threading.Condition()
        self._closed = False
        self._mean_s = 1.0  # of one ticket, for Retry-After
        self._thread = threading.Thread(target=self._loop, name="precache-turns", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Tickets that have not begun."""
        return len(self._waiting)

    def submit(self, work: Work[T], timeout_s: float) -> Ticket[T]:
        """Put work into the queue. Raises OverloadedError if it is full or the server is going down."""
        with self._condition:
            if self._closed:
                raise shutting_down()
            if len(self._waiting) >= self.max_waiting and (self._waiting or self.running):
                raise OverloadedError(
                    f"{len(self._waiting)} requests are waiting already, allowed are {self.max_waiting}",
                    "queue_full",
                    self._retry_after_s(),
                )
            ticket: Ticket[T] = Ticket(work, self, timeout_s)
            self._waiting.append(ticket)  # type: ignore[arg-type]
            self._condition.notify()
        return ticket

    def forget(self, ticket: Ticket[T]) -> None:
        """Take a cancelled ticket out of the queue, if it still waits."""
        with self._condition, suppress(ValueError):
            self._waiting.remove(ticket)  # type: ignore[arg-type]

    def close(self) -> None:
        """Take nothing more, and end what waits. What runs goes on. For the event loop's thread."""
        with self._condition:
            self._closed = True
            waiting = list(self._waiting)
            self._condition.notify()
        for ticket in waiting:
            ticket.cancel(shutting_down())

    def abort(self) -> None:
        """End what runs. For the event loop's thread."""
        running = self.running  # the queue's thread may put None there at any moment
        if running is not None:
            running.cancel(shutting_down())

    def join(self) -> None:
        """Wait for the thread to end; ``close`` first."""
        self._thread.join()

    def _retry_after_s(self) -> int:
        return min(_MAX_RETRY_S, max(1, round(self._mean_s * (1 + len(self._waiting)))))

    def _loop(self) -> None:
        while self._wait():
            with self._busy():
                while self._next():
                    assert self.running is not None
                    self._run(self.running)

    def _wait(self) -> bool:
        with self._condition:
            self._condition.wait_for(lambda: self._waiting or self._closed)
            return bool(self._waiting)

    def _next(self) -> bool:
        with self._condition:
            self.running = self._waiting.popleft() if self._waiting else None
            return self.running is not None

    def _run(self, ticket: Ticket[object]) -> None:
        started = time.monotonic()
        ticket.run()
        self._mean_s = 0.8 * self._mean_s + 0.2 * (time.monotonic() - started)


def shutting_down() -> ApiError:
    """The answer of a server that is going down."""
    return OverloadedError("the server is shutting down", "shutting_down", 5)
