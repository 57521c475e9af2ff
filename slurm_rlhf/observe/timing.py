"""Measure where the seconds of a step go: per phase, and per accelerator while it is idle."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


class Phases:
    """Add up wall time per phase: `with phases("rollout"): ...`, then `take()` once a step.

    Time in a phase inside another one counts for the inner one alone, so that phases add up to at most the step.
    `watch` is called with each phase that begins and, when it is over, with the phase around it or ""; `ended`, just
    before that, with the one that is over.
    """

    def __init__(
        self, watch: Callable[[str], None] = lambda name: None, ended: Callable[[str], None] = lambda name: None
    ) -> None:
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._watch = watch
        self._ended = ended

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        self._open.append(name)
        self._watch(name)
        try:
            yield
        finally:
            self._open.pop()
            self._ended(name)
            self._watch(self._open[-1] if self._open else "")
            seconds = time.monotonic() - start
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds
            if self._open:
                outer = self._open[-1]
                self._seconds[outer] = self._seconds.get(outer, 0.0) - seconds

    def take(self) -> dict[str, float]:
        """Return the seconds per phase since the last call, as `time/<phase>`."""
        taken = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return taken


Slot = tuple[str, int]
"""(node, accelerator of it)."""


@dataclass(slots=True)
class _Busy:
    open: int = 0  # calls in progress
    since: float = 0.0  # while a call is in progress: `seconds` includes the time up to here
    seconds: float = 0.0


class GpuTime:
    """Measure how long each accelerator was idle: while no call was in progress on any rank that uses it.

    A call counts from when it is sent until its answer has arrived. An engine's `generate` is in progress while it has
    requests, and so are its steps. What a rank waits for inside a call, a peer or data, counts as work. Its
    methods may be called from any thread.
    """

    def __init__(self, slots: Mapping[str, Sequence[Sequence[Slot]]], clock: Callable[[], float] = time.monotonic):
        """`slots`: role -> rank -> the accelerators that a call to it keeps busy (all of an engine, for its leader)."""
        self._clock = clock
        self._of = {role: [tuple(of) for of in ranks] for role, ranks in slots.items()}
        self._lock = threading.Lock()
        self._busy = {slot: _Busy() for ranks in self._of.values() for of in ranks for slot in of}
        self._taken = clock()

    def began(self, role: str, rank: int, call: str = "") -> Callable[[], None]:
        """Note that a call was sent, whichever; call the returned function once, when its answer has arrived."""
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
        """Return (seconds since the last call, accelerator -> how many of them it was idle)."""
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
