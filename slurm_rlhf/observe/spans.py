"""Record when each rank had a call in progress, for the last steps: timeline.jsonl, one line a step."""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slurm_rlhf.observe.jsonl import append_line, read_rows
from slurm_rlhf.run_directory import write_atomically

KEPT = 12
"""Steps that the file has at least, once they are done; at most twice as many."""
MOST = 4000
"""Spans of a step. Beyond it short pauses between calls to a rank are left out, the shortest first."""

Call = tuple[str, int, str]
"""(role, rank, name of the call); for an engine the rank is that of its leader."""
Span = tuple[float, float]
"""(begin, end) in seconds."""


class CallSpans:
    """Collects the calls of a step, and the phases of the conductor. Its methods may be called from any thread.

    A call counts from when it is sent until its answer has arrived: what a rank waits for inside it, a peer or data,
    counts as work.
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
        """Note the phase of the conductor that begins; empty: none."""
        with self._lock:
            self._next_phase(name, self._clock())

    def _next_phase(self, name: str, now: float) -> None:
        last, start = self._phase
        if last and now > start:
            self._phases.append((last, start, now))
        self._phase = (name, now)

    def take(self, step: int) -> dict[str, Any]:
        """Return the line of a step, which ends now: times in seconds since `began`, a Unix time.

        What is still in progress is cut here, and goes on in the next step.
        """
        with self._lock:
            now, began = self._clock(), self._began
            for number, (call, start) in self._open.items():
                self._done[call].append((start, now))
                self._open[number] = (call, now)
            self._next_phase(self._phase[0], now)
            done, phases = self._done, self._phases
            self._done, self._phases, self._began = defaultdict(list), [], now
        calls = [
            [role, rank, name, round(start - began, 4), round(end - began, 4)]
            for (role, rank, name), spans in sorted(thinned(done, MOST, (now - began) / 1000).items())
            for start, end in spans
        ]
        return {
            "step": step,
            "began": round(self._epoch + began, 3),
            "seconds": round(now - began, 4),
            "phases": [[name, round(start - began, 4), round(end - began, 4)] for name, start, end in phases],
            "calls": calls,
        }


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
    """Join the spans of each call, over gaps that are as long as it takes to have at most `most` (or one a call)."""
    while True:
        found = {call: joined(spans, gap) for call, spans in calls.items()}
        if sum(map(len, found.values())) <= max(most, len(found)):
            return found
        gap = 2 * gap or 1e-6


class TimelineLog:
    """Append the lines of the last steps to a file, and drop the older ones now and then."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = 0

    def append(self, row: dict[str, Any]) -> None:
        """Write the line of a step. Raises OSError."""
        if not self._lines:
            self._lines = len(read_rows(self._path))
        if self._lines >= 2 * KEPT:
            kept = read_rows(self._path)[1 - KEPT :]
            write_atomically(self._path, "".join(json.dumps(each) + "\n" for each in kept))
            self._lines = len(kept)
        append_line(self._path, row)
        self._lines += 1
