"""Poll for a condition, stop waiting for a call that may never return, and count calls of users' code in progress."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


def wait_until(ready: Callable[[], object], timeout_s: float, pause_s: float = 0.005, longest_s: float = 0.1) -> bool:
    """Call `ready()` until it is true or `timeout_s` seconds have passed; return whether it became true.

    Pauses grow from `pause_s` to `longest_s`. An exception of `ready` ends the wait.
    """
    deadline = time.monotonic() + timeout_s
    while not ready():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, longest_s)
    return True


def in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Run `work` in a thread of its own, so that the caller can stop waiting for a call into a library."""
    found: Future[T] = Future()

    def run() -> None:
        try:
            found.set_result(work())
        except BaseException as error:  # raised by `result`
            found.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return found


class CallsUnderWay:
    """Knows the calls of users' code, in workers and on servers, that this process waits for. Any thread may use it."""

    def __init__(self) -> None:
        self.ended = 0
        """Number of calls that have ended: while it stays the same, none of them makes progress."""
        self._limits: list[float] = []
        self._lock = threading.Lock()

    @contextmanager
    def one(self, limit_s: float) -> Iterator[None]:
        """Count a call as under way inside the block; it ends within `limit_s`, whatever the user's code does."""
        with self._lock:
            self._limits.append(limit_s)
        try:
            yield
        finally:
            with self._lock:
                self._limits.remove(limit_s)
                self.ended += 1

    def longest_s(self) -> float:
        """Return the largest limit of a call that is under way; 0: there is none."""
        with self._lock:
            return max(self._limits, default=0.0)


UNDER_WAY = CallsUnderWay()
