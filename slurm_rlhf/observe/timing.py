"""Measure where the seconds of a step go, per phase and per idle accelerator, and learn how long nothing may move."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field


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


FACTOR = 10.0
"""A wait this many times as long as the phase's usual longest one is no ordinary wait."""
LEARNED = 3
"""Passes through a phase until it is known what is usual."""
UNSURE = 3.0
"""Until then the budget is so many times as large."""
UNKNOWN = 20.0
"""In the first pass the budget is so many times the floor. It is told then, and the run ends at the ceiling only: there
is nothing that the wait could be compared with."""
REMEMBERED = 50


@dataclass(frozen=True, slots=True)
class Budget:
    """Says how many seconds nothing may move in a phase before it is told."""

    seconds: float
    usual_s: float | None  # longest wait of a usual pass; None: there was none yet
    ends_s: float = 0.0  # the run does not end before nothing has moved for so long

    def words(self) -> str:
        if self.usual_s is None:
            return f"budget {self.seconds:.0f} s: the first time, it is not known what is usual"
        return f"budget {self.seconds:.0f} s; usually nothing moves for {self.usual_s:.1f} s at most"


@dataclass(slots=True)
class WaitBudgets:
    """Learns the longest wait of each pass through each phase, and makes budgets of their median.

    The median, because a single pass that was held up, by a slow disk or by a hang that ended, must not widen the
    budget of the later ones.
    """

    floor_s: float
    _longest: dict[str, deque[float]] = field(default_factory=dict, init=False)
    _now: dict[str, float] = field(default_factory=dict, init=False)  # longest so far, in the pass that is under way

    def waited(self, phase: str, seconds: float) -> None:
        """Note that something moved in `phase`, after `seconds` in which nothing had."""
        self._now[phase] = max(self._now.get(phase, 0.0), seconds)

    def passed(self, phase: str) -> None:
        """Note that `phase` is over."""
        if phase in self._now:
            self._longest.setdefault(phase, deque(maxlen=REMEMBERED)).append(self._now.pop(phase))

    def of(self, phase: str, ceiling_s: float, once: bool = False) -> Budget:
        """Return the budget of `phase`, between the floor and `ceiling_s`, which wins.

        `once`: the phase comes once and takes long, as loading a model does: its budget is the ceiling.
        """
        seen = self._longest.get(phase, ())
        if not seen:
            return Budget(ceiling_s if once else min(UNKNOWN * self.floor_s, ceiling_s), None, ceiling_s)
        usual, times = (max(seen), UNSURE) if len(seen) < LEARNED else (statistics.median(seen), 1.0)
        return Budget(min(times * max(self.floor_s, FACTOR * usual), ceiling_s), usual)
