"""Where the seconds of a step go."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Phases:
    """Adds up wall time per phase: `with phases("rollout"): ...`, then `take()` once a step.

    Time in a phase inside another one counts for the inner one alone, so that phases add up to at most the step.
    `watch` is told the phase that begins, and the one around it, or "", when it is over.
    """

    def __init__(self, watch: Callable[[str], None] = lambda name: None) -> None:
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._watch = watch

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        self._open.append(name)
        self._watch(name)
        try:
            yield
        finally:
            self._open.pop()
            self._watch(self._open[-1] if self._open else "")
            seconds = time.monotonic() - start
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds
            if self._open:
                outer = self._open[-1]
                self._seconds[outer] = self._seconds.get(outer, 0.0) - seconds

    def take(self) -> dict[str, float]:
        """Seconds per phase since the last call, as `time/<phase>`."""
        taken = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return taken
