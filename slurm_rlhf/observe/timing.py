"""Measure where the seconds of a step go, per phase, rank and GPU, and learn how long a phase usually waits."""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm_rlhf.observe.run_log import append_line, read_rows
from slurm_rlhf.run_directory import write_atomically


@dataclass(slots=True)
class Phases:
    """Add up wall time per phase: `with phases("rollout"): ...`, then `take()` once a step.

    Time in a phase inside another one counts only for the inner one, so that all phases together take at most the step.
    `watch` is called with each phase that begins and, when it has ended, with the outer phase or ""; just before that,
    `ended` is called with the phase that has ended.
    """

    watch: Callable[[str], None] = lambda name: None
    ended: Callable[[str], None] = lambda name: None
    _seconds: dict[str, float] = field(default_factory=dict, init=False)
    _open: list[str] = field(default_factory=list, init=False)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        self._open.append(name)
        self.watch(name)
        try:
            yield
        finally:
            self._open.pop()
            self.ended(name)
            self.watch(self._open[-1] if self._open else "")
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
"""(node, index of the accelerator)."""


FACTOR = 10.0
"""A budget is this many times the usual longest wait of the phase."""
LEARNED = 3
"""Passes through a phase until its usual wait is known."""
UNSURE = 3.0
"""Factor on the budget until then."""
UNKNOWN = 20.0
"""Factor on the floor in the first pass through a phase, which has no earlier wait to compare with. A longer wait is
only reported; the run ends at the ceiling."""
REMEMBERED = 50  # passes


@dataclass(frozen=True, slots=True)
class Budget:
    """Say how long a phase may make no progress before that is reported."""

    seconds: float
    usual_s: float | None  # longest wait in a usual pass; None: not known yet
    ends_s: float = 0.0  # the run ends only after that many seconds without progress

    def words(self) -> str:
        if self.usual_s is None:
            return f"budget {self.seconds:.0f} s: the usual wait is not known in the first pass"
        return f"budget {self.seconds:.0f} s; the usual wait is at most {self.usual_s:.1f} s"


@dataclass(slots=True)
class WaitBudgets:
    """Learn the longest wait of each pass through each phase; a budget is a multiple of their median.

    The median, because a single long wait, on a slow disk or in a hang that ended, must not raise later budgets.
    """

    floor_s: float
    _longest: dict[str, deque[float]] = field(default_factory=dict, init=False)
    _now: dict[str, float] = field(default_factory=dict, init=False)  # longest wait so far in the current pass

    def waited(self, phase: str, seconds: float) -> None:
        """Note progress in `phase` after `seconds` without any."""
        self._now[phase] = max(self._now.get(phase, 0.0), seconds)

    def passed(self, phase: str) -> None:
        """Note that `phase` is over."""
        if phase in self._now:
            self._longest.setdefault(phase, deque(maxlen=REMEMBERED)).append(self._now.pop(phase))

    def of(self, phase: str, ceiling_s: float, once: bool = False) -> Budget:
        """Return the budget of `phase`: at least the floor, but at most `ceiling_s`.

        `once`: the phase comes only once and takes long, such as loading a model: its budget is the ceiling.
        """
        seen = self._longest.get(phase, ())
        if not seen:
            return Budget(ceiling_s if once else min(UNKNOWN * self.floor_s, ceiling_s), None, ceiling_s)
        usual, times = (max(seen), UNSURE) if len(seen) < LEARNED else (statistics.median(seen), 1.0)
        return Budget(min(times * max(self.floor_s, FACTOR * usual), ceiling_s), usual)


KEPT = 12
"""The file has the last `KEPT` steps at least, and twice as many at most."""
MOST = 4000
"""Most spans of a step. If there are more, calls with short pauses between them become one span."""

Call = tuple[str, int, str]
"""(role, rank, name of the call); the rank of an engine is that of its leader."""
Span = tuple[float, float]
"""(begin, end) in seconds."""


@dataclass(frozen=True, slots=True)
class StepSpans:
    """Holds the calls of a step, and the phases of the conductor, in seconds of one clock."""

    began: float
    ended: float
    calls: dict[Call, list[Span]]
    phases: list[tuple[str, float, float]]
    epoch: float  # Unix time at which the clock was 0

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    def line(self, step: int) -> dict[str, Any]:
        """Return the line of the timeline: times in seconds since `began`, which is a Unix time there."""
        began = self.began
        return {
            "step": step,
            "began": round(self.epoch + began, 3),
            "seconds": round(self.seconds, 4),
            "phases": [[name, round(start - began, 4), round(end - began, 4)] for name, start, end in self.phases],
            "calls": [
                [role, rank, name, round(start - began, 4), round(end - began, 4)]
                for (role, rank, name), spans in sorted(thinned(self.calls, MOST, self.seconds / 1000).items())
                for start, end in spans
            ],
        }

    def idle(self, slots: Mapping[str, Sequence[Sequence[Slot]]]) -> dict[Slot, float]:
        """Return the idle seconds of each accelerator: those in which no rank that uses it had a call in progress.

        `slots`: role -> rank -> the accelerators that a call keeps busy; for an engine's leader, all of the engine.
        """
        of = {(role, rank): used for role, ranks in slots.items() for rank, used in enumerate(ranks)}
        busy: dict[Slot, list[Span]] = {slot: [] for used in of.values() for slot in used}
        for (role, rank, _), spans in self.calls.items():
            for slot in of.get((role, rank), ()):
                busy[slot] += spans
        worked = {slot: sum(end - start for start, end in joined(spans, 0.0)) for slot, spans in busy.items()}
        return {slot: max(0.0, self.seconds - seconds) for slot, seconds in worked.items()}


class CallSpans:
    """Collect the calls of a step, and the phases of the conductor. Any thread may call the methods.

    A call takes from when it is sent until its answer arrives. If a rank waits inside it, that counts as work.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._epoch = time.time() - clock()
        self._lock = threading.Lock()
        self._open: dict[int, tuple[Call, float]] = {}
        self._done: dict[Call, list[Span]] = defaultdict(list)
        self._phases: list[tuple[str, float, float]] = []
        self._phase = ("", clock())
        self._began = clock()
        self._count = 0

    def began(self, role: str, rank: int, name: str) -> Callable[[], None]:
        """Note that a call was sent; call the returned function once, when its answer has arrived."""
        with self._lock:
            self._count += 1
            number = self._count
            self._open[number] = ((role, rank, name), self._clock())

        def ended() -> None:
            with self._lock:
                call, start = self._open.pop(number)
                self._done[call].append((start, self._clock()))

        return ended

    def phase(self, name: str) -> None:
        """Note that a phase of the conductor begins; empty: none."""
        with self._lock:
            self._next_phase(name, self._clock())

    def _next_phase(self, name: str, now: float) -> None:
        last, start = self._phase
        if last and now > start:
            self._phases.append((last, start, now))
        self._phase = (name, now)

    def take(self) -> StepSpans:
        """Return the spans since the last `take`. A call in progress is cut here, and continues in the next step."""
        with self._lock:
            now, began = self._clock(), self._began
            for number, (call, start) in self._open.items():
                self._done[call].append((start, now))
                self._open[number] = (call, now)
            self._next_phase(self._phase[0], now)
            done, phases = self._done, self._phases
            self._done, self._phases, self._began = defaultdict(list), [], now
        return StepSpans(began, now, done, phases, self._epoch)


def joined(spans: Sequence[Span], gap: float) -> list[Span]:
    """Join spans that overlap or are at most `gap` seconds apart."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start - found[-1][1] <= gap:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def thinned(calls: dict[Call, list[Span]], most: int, gap: float) -> dict[Call, list[Span]]:
    """Join the spans of each call over gaps of at least `gap`, longer ones until at most `most` spans are left."""
    while True:
        found = {call: joined(spans, gap) for call, spans in calls.items()}
        if sum(map(len, found.values())) <= max(most, len(found)):
            return found
        gap = 2 * gap or 1e-6


def append_timeline(path: Path, row: dict[str, Any]) -> None:
    """Write the line of a step, and drop old ones from time to time. Raises OSError."""
    if row["step"] % KEPT == 0:
        kept = read_rows(path)[1 - KEPT :]
        write_atomically(path, "".join(json.dumps(each) + "\n" for each in kept))
    append_line(path, row)
