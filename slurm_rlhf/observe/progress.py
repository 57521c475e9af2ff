"""What the user sees while the run goes on: rich on a terminal, one plain line per step elsewhere."""

from __future__ import annotations

import sys
from typing import Protocol

from slurm_rlhf.config.schema import Logger
from slurm_rlhf.observe.eta import Clock
from slurm_rlhf.observe.table import EVERY, duration, header, line, row


class Progress(Protocol):
    """Called by the conductor's main thread; nothing here blocks."""

    def begin(self, done: int, total: int) -> None:
        """The first step is about to start; `done` steps were done before."""

    def phase(self, name: str) -> None:
        """The phase that begins; empty: none."""

    def note(self, text: str) -> None:
        """Something the user should know."""

    def step(self, step: int, total: int, metrics: dict[str, float]) -> None:
        """A step is done."""

    def end(self) -> None:
        """No more steps."""


def make_progress(settings: Logger) -> Progress:
    """The kind that `logger.progress` names; auto: rich where standard output is a terminal."""
    kind = settings.progress
    if kind == "auto":
        kind = "rich" if sys.stdout.isatty() else "plain"
    if kind == "rich":
        from slurm_rlhf.observe.live import LiveProgress

        return LiveProgress()
    return PlainProgress() if kind == "plain" else NoProgress()


class PlainProgress:
    """Lines that read well in a Slurm log file: a table whose header comes again every 20 rows."""

    def __init__(self) -> None:
        self._clock = Clock()
        self._rows = 0

    def begin(self, done: int, total: int) -> None:
        self._clock.tick()

    def phase(self, name: str) -> None:
        """A log file has no line that could change."""

    def note(self, text: str) -> None:
        print(text, flush=True)

    def step(self, step: int, total: int, metrics: dict[str, float]) -> None:
        self._clock.tick()
        if self._rows % EVERY == 0:
            print(header())
        self._rows += 1
        print(line(row(step, total, metrics, duration(self._clock.remaining(total - step)))))
        if "eval" in metrics:
            print(f"{'':9} evaluation {metrics['eval']:.4f}")
        sys.stdout.flush()

    def end(self) -> None:
        """Nothing is held back."""


class NoProgress:
    """Errors still reach the terminal; everything else is in the files."""

    def begin(self, done: int, total: int) -> None:
        """Not shown."""

    def phase(self, name: str) -> None:
        """Not shown."""

    def note(self, text: str) -> None:
        """Not shown."""

    def step(self, step: int, total: int, metrics: dict[str, float]) -> None:
        """Not shown."""

    def end(self) -> None:
        """Not shown."""
