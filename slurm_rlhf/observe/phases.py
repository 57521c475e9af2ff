"""Where the seconds of a step go."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Phases:
    """Adds up wall time per phase: `with phases("rollout"): ...`, then `take()` once a step.

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
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - start

    def take(self) -> dict[str, float]:
        """Seconds per phase since the last call, as `time/<phase>`."""
        taken = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return taken
