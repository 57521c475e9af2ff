"""How long each accelerator of a run had something to do, seen from where the work is given out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Slot = tuple[str, int]
"""(node, accelerator of it)."""


@dataclass(slots=True)
class _Busy:
    open: int = 0  # calls in progress
    since: float = 0.0  # up to here `seconds` has counted, where a call is in progress
    seconds: float = 0.0


class GpuTime:
    """An accelerator is idle while no call is in progress on any rank that computes on it.

    A call counts from when it is sent until its answer is there. An engine's `generate` is in progress while it has
    requests, and so are its steps. What a rank waits for inside a call, a peer or data, counts as work. Takes calls
    on any thread.
    """

    def __init__(self, slots: Mapping[str, Sequence[Sequence[Slot]]], clock: Callable[[], float] = time.monotonic):
        """`slots`: role -> rank -> the accelerators that a call to it sets to work: of an engine's leader, all."""
        self._clock = clock
        self._of = {role: [tuple(of) for of in ranks] for role, ranks in slots.items()}
        self._lock = threading.Lock()
        self._busy = {slot: _Busy() for ranks in self._of.values() for of in ranks for slot in of}
        self._taken = clock()

    def began(self, role: str, rank: int) -> Callable[[], None]:
        """A call was sent; what this returns is to be called once, when its answer is there."""
        slots = self._of[role][rank]
        with self._lock:
            now = self._clock()
            for slot in slots:
                busy = self._busy[slot]
                if busy.open == 0:
                    busy.since = now
                busy.open += 1

        def ended() -> None:
            with self._lock:
                now = self._clock()
                for slot in slots:
                    busy = self._busy[slot]
                    busy.open -= 1
                    if busy.open == 0:
                        busy.seconds += now - busy.since

        return ended

    def take(self) -> tuple[float, dict[Slot, float]]:
        """(seconds since the last call, accelerator -> seconds of them that it was idle)."""
        with self._lock:
            now = self._clock()
            seconds, self._taken = now - self._taken, now
            idle = {}
            for slot, busy in self._busy.items():
                if busy.open:
                    busy.seconds += now - busy.since
                    busy.since = now
                idle[slot] = max(0.0, seconds - busy.seconds)
                busy.seconds = 0.0
        return seconds, idle
