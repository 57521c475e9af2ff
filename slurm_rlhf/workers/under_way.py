"""Counts the calls of users' code, and holds their deadlines: the watchdog asks whether they get on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class CallsUnderWay:
    """Knows the calls of users' code, in workers and on servers, that this process waits for. Any thread may use it."""

    def __init__(self) -> None:
        self.ended = 0
        """Count of the calls that have ended: while it stays the same, none of them gets on."""
        self._limits: list[float] = []
        self._lock = threading.Lock()

    @contextmanager
    def one(self, limit_s: float) -> Iterator[None]:
        """Hold a call that ends within `limit_s`, whatever the user's code does."""
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
