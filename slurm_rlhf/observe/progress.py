"""Show progress to the user: a table row per step, as plain lines here, in `live` with rich on a terminal.

The display never stops a run: a missing figure is a dash.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass


class Progress:
    """Show nothing; subclasses show the progress of a run.

    The conductor's main thread calls the methods, and none blocks. Errors are printed elsewhere.
    """

    def begin(self, done: int, total: int) -> None:
        """Begin to show steps; `done` of `total` steps were done before."""

    def phase(self, name: str, responses: int = 0) -> None:
        """Show the phase `name` that begins (empty: none). `responses`: how many it will have; 0: not known."""

    def answered(self, responses: int, tokens: int) -> None:
        """Count responses that engines have finished in this phase, and sampled tokens. Any thread may call it."""

    def note(self, text: str) -> None:
        """Show a line of text."""

    def step(self, step: int, total: int, metrics: dict[str, float]) -> None:
        """Show a step that is done."""

    def end(self) -> None:
        """End the display."""


class PlainProgress(Progress):
    """Print lines for a log file: a table whose header is repeated every 20 rows."""

    def __init__(self) -> None:
        self._clock = Clock()
        self._names = ""
        self._rows = 0  # since the last header

    @property
    def _width(self) -> int:
        return shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDE

    def begin(self, done: int, total: int) -> None:
        self._clock.tick()

    def note(self, text: str) -> None:
        _print(text)

    def step(self, step: int, total: int, metrics: dict[str, float]) -> None:
        self._clock.tick()
        cells = row(step, total, metrics, duration(self._clock.remaining(total - step)), self._width)
        names = header(cells)
        if names != self._names or self._rows == EVERY:
            self._show([Cell(names, "underline dim")])
            self._names, self._rows = names, 0
        self._rows += 1
        self._show(cells)
        if "eval" in metrics:
            self._show([Cell(f"{'':9} evaluation {metrics['eval']:.4f}", "bold magenta")])

    def _show(self, cells: list[Cell]) -> None:
        _print(line(cells))


def _print(text: str) -> None:
    """Print a line in one piece: `print` writes its end apart, and another thread's line could come in between."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


PHASES = ("rollout", "reward", "forward", "update", "sync")
"""Phases with their own columns; the column `other` holds the rest of a step."""

WIDE = 100
"""Width of a table with all columns; a log file gets it."""
NARROW = ("rollout", "update")
"""Phases with their own columns on a narrower terminal, so that a row has 80 characters."""

EVERY = 20
"""Rows between two headers."""

SCORES = "accuracy"
"""Metric with a column only if the reward function gives scores."""


@dataclass(frozen=True, slots=True)
class Cell:
    text: str  # padded to the column's width
    style: str  # a style of rich
    name: str = ""  # over the column


def row(step: int, total: int, metrics: Mapping[str, float], remaining: str, width: int = WIDE) -> list[Cell]:
    """Format one step in 100 characters, on a narrower terminal in 80; a missing metric is a dash."""
    seconds = metrics.get("time/step", math.nan)
    phases = {name: metrics.get(f"time/{name}") for name in (PHASES if width >= WIDE else NARROW)}
    rest = seconds - sum(value for value in phases.values() if value is not None)
    return [
        Cell(f"{step}/{total}".rjust(9), "bold", "step"),
        Cell(_fixed(metrics.get("reward"), 7, 3), "bold green", "reward"),
        Cell(_fixed(metrics.get("kl"), 7, 4), "", "kl"),
        *([Cell(_fixed(metrics[SCORES], 5, 3), "green", "acc")] if SCORES in metrics else []),
        Cell(count(metrics.get("perf/tokens_per_s"), 6), "", "tok/s"),
        Cell(_fixed(seconds, 6, 2), "bold", "sec"),
        *(Cell(_fixed(value, max(5, len(name)), 2), "dim", name) for name, value in phases.items()),
        Cell(_fixed(max(rest, 0.0), 5, 2), "dim", "other"),
        Cell(remaining.rjust(7), "cyan", "eta"),
    ]


def header(cells: list[Cell]) -> str:
    """Return the names over the columns of a row."""
    return " ".join(cell.name.rjust(len(cell.text)) for cell in cells)


def line(cells: list[Cell]) -> str:
    """Join a row to plain text."""
    return " ".join(cell.text for cell in cells)


def duration(seconds: float) -> str:
    """Format seconds as m:ss or h:mm:ss; a dash if they are not known."""
    if not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _fixed(value: float | None, width: int, decimals: int) -> str:
    """Format `value` with as many of `decimals` as fit into `width`."""
    if value is None or math.isnan(value):
        return "-".rjust(width)
    texts = [f"{value:.{digits}f}" for digits in range(decimals, -1, -1)]
    return next((text for text in texts if len(text) <= width), f"{value:.0e}").rjust(width)


def count(value: float | None, width: int) -> str:
    """Format `value` as an integer, with k or M if it is too wide."""
    if value is None or not math.isfinite(value):
        return "-".rjust(width)
    for scale, unit in ((1, ""), (1e3, "k"), (1e6, "M")):
        text = f"{value / scale:.0f}{unit}"
        if len(text) <= width:
            break
    return text.rjust(width)


_WINDOW = 20  # steps for the estimate


class Clock:
    """Estimate the time that is left from the last steps, so that slow first steps soon do not count."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=_WINDOW + 1)

    def tick(self) -> None:
        """Note that the steps begin, or that a step is done."""
        self._ends.append(time.monotonic())

    def remaining(self, steps: int) -> float:
        """Estimate the seconds for `steps` more steps; NaN before the first step."""
        if len(self._ends) < 2:
            return math.nan
        return (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1) * steps
