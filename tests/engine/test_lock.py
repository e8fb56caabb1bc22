"""The engine's lock: one owner, re-entrant, and first come, first served."""

from __future__ import annotations

import threading
import time

import pytest

from precache.engine import lock as lock_module
from precache.engine.lock import FairLock


def wait_for(lock: FairLock, waiting: int) -> None:
    deadline = time.monotonic() + 60
    while lock.waiting != waiting:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_waiting_threads_come_in_the_order_of_asking() -> None:
    lock, order = FairLock(), []

    def work(number: int) -> None:
        with lock:
            order.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(5)]
    with lock, lock:  # re-entrant
        for count, thread in enumerate(threads, 1):
            thread.start()
            wait_for(lock, count)
        assert order == []
    # Its owner asks again at once, and comes after those who waited.
    with lock:
        assert order == [0, 1, 2, 3, 4]
    for thread in threads:
        thread.join()
    assert lock.waiting == 0


def test_an_error_in_the_block_releases_it() -> None:
    lock = FairLock()
    with pytest.raises(ValueError, match="inside"), lock:
        raise ValueError("inside")
    with lock:
        pass


def test_one_owner_at_a_time() -> None:
    lock, inside, most = FairLock(), 0, 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(200):
            with lock:
                inside += 1
                most = max(most, inside)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (inside, most) == (0, 1)


@pytest.mark.parametrize("handed_over", [False, True])
def test_a_thread_that_is_interrupted_while_it_waits_leaves_the_queue(
    handed_over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, asked, go_on, outcome = FairLock(), threading.Event(), threading.Event(), []

    class Interrupted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            asked.set()
            go_on.wait(60)
            raise KeyboardInterrupt

    def work() -> None:
        try:
            with lock:
                outcome.append("inside")
        except KeyboardInterrupt:
            outcome.append("interrupted")

    monkeypatch.setattr(lock_module, "Event", Interrupted)
    thread = threading.Thread(target=work)
    with lock:
        thread.start()
        assert asked.wait(60)
        if not handed_over:
            go_on.set()
            thread.join()
    go_on.set()
    thread.join()
    assert outcome == ["interrupted"]
    with lock:  # nobody holds it any more
        assert lock.waiting == 0
