"""Show progress to the user: rich on a terminal, one plain line per step elsewhere."""

from __future__ import annotations

import sys

from slurm_rlhf.config.schema import Logger
from slurm_rlhf.observe.table import EVERY, Clock, duration, header, line, row


class Progress:
    """Show nothing; subclasses show how a run goes on.

    The conductor's main thread calls it; nothing here blocks. Errors reach the terminal whatever is chosen.
    """

    def begin(self, done: int, total: int) -> None:
        """Start to show steps; `done` steps were done before."""

    def phase(self, name: str) -> None:
        """Show the phase that begins; empty: none."""

    def note(self, text: str) -> None:
        """Show something the user should know."""

    def step(self, step: int, total: int, metrics: dict[str, float]) -> None:
        """Show a step that is done."""

    def end(self) -> None:
        """Stop: there are no more steps."""


def make_progress(settings: Logger) -> Progress:
    """Make the kind that `logger.progress` names; auto: rich if standard output is a terminal."""
    kind = settings.progress
    if kind == "auto":
        kind = "rich" if sys.stdout.isatty() else "plain"
    if kind == "rich":
        from slurm_rlhf.observe.live import LiveProgress

        return LiveProgress()
    return PlainProgress() if kind == "plain" else Progress()


class PlainProgress(Progress):
    """Print lines that read well in a Slurm log file: a table whose header is repeated every 20 rows."""

    def __init__(self) -> None:
        self._clock = Clock()
        self._rows = 0

    def begin(self, done: int, total: int) -> None:
        self._clock.tick()

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
