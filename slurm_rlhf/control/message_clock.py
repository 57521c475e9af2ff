"""A clock that stands still while this process cannot listen."""

from __future__ import annotations

import time


class ListeningClock:
    """Seconds in which the I/O thread was able to hear others.

    A process that was suspended (`scontrol suspend`), or whose interpreter lock was held, heard nobody during that
    time: it must count neither as silence of the others nor against the deadlines of calls to them.

    The I/O thread judges silence and deadlines by what its last `tick` returned, never by `now`: a suspension in the
    middle of a round is only known at the next tick.
    """

    def __init__(self, longest_round: float) -> None:
        """`longest_round`: what a round of the I/O loop takes beyond this is not counted."""
        self._longest_round = longest_round
        self._missed = 0.0
        self._last = time.monotonic()

    def now(self) -> float:
        """Seconds since some fixed moment, for other threads."""
        return time.monotonic() - self._missed

    def tick(self) -> float:
        """For the I/O thread, once per round of its loop, after waiting and before reading; the time of that round."""
        real = time.monotonic()
        self._missed += max(0.0, real - self._last - self._longest_round)
        self._last = real
        return real - self._missed
