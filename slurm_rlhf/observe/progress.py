"""What the user sees while the run goes on: rich on a terminal, one plain line per step elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from slurm_rlhf.config.schema import Logger

PHASES = ("rollout", "reward", "forward", "update", "sync", "eval", "checkpoint")
_WINDOW = 20  # steps that the estimate of the remaining time looks back


class Progress(Protocol):
    """Called by the conductor's main thread."""

    def begin(self, done: int, total: int) -> None:
        """The first step is about to start; `done` steps were done before."""

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
    kinds: dict[str, Callable[[], Progress]] = {"rich": RichProgress, "plain": PlainProgress, "none": NoProgress}
    return kinds[kind]()


class Clock:
    """Estimates the remaining seconds from the last steps."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=_WINDOW + 1)

    def tick(self) -> None:
        self._ends.append(time.monotonic())

    def remaining(self, steps: int) -> str:
        """`steps` more steps as m:ss or h:mm:ss; `-` while nothing is known."""
        if len(self._ends) < 2:
            return "-"
        seconds = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1) * steps
        minutes, rest = divmod(math.ceil(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def headline(metrics: dict[str, float]) -> str:
    """The numbers of a step that tell whether it learns: `reward 0.512  kl 0.0031  acc 0.512  2210 tok/s`."""
    words = [f"reward {metrics['reward']:.3f}", f"kl {metrics['kl']:.4f}"]
    if "accuracy" in metrics:
        words.append(f"acc {metrics['accuracy']:.3f}")
    if "eval" in metrics:
        words.append(f"eval {metrics['eval']:.3f}")
    words.append(f"{metrics['perf/tokens_per_s']:.0f} tok/s")
    return "  ".join(words)


def phase_seconds(metrics: dict[str, float]) -> str:
    """Where the step's time went, phases below 5 ms left out: `1.84 s (rollout 0.61, update 0.98)`."""
    parts = [f"{name} {metrics[f'time/{name}']:.2f}" for name in PHASES if metrics.get(f"time/{name}", 0.0) >= 0.005]
    return f"{metrics['time/step']:.2f} s ({', '.join(parts)})"


class PlainProgress:
    """Lines that read well in a Slurm log file."""

    def __init__(self) -> None:
        self._clock = Clock()

    def begin(self, done: int, total: int) -> None:
        self._clock.tick()

    def note(self, text: str) -> None:
        print(text, flush=True)

    def step(self, step: int, total: int, metrics: dict[str, float]) -> None:
        self._clock.tick()
        eta = self._clock.remaining(total - step)
        print(
            f"step {step:>{len(str(total))}}/{total}  {headline(metrics)}  {phase_seconds(metrics)}  eta {eta}",
            flush=True,
        )

    def end(self) -> None:
        """Nothing is held back."""


class NoProgress(PlainProgress):
    """Errors still reach the terminal; everything else is in the files."""

    def note(self, text: str) -> None:
        """Not shown."""

    def step(self, step: int, total: int, metrics: dict[str, float]) -> None:
        """Not shown."""


class RichProgress:
    """A bar that stays at the bottom, over it what the last step brought."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(highlight=False)
        self._clock = Clock()
        self._live: Any = None

    def begin(self, done: int, total: int) -> None:
        from rich.live import Live

        self._clock.tick()
        self._live = Live(console=self._console, refresh_per_second=4, transient=False)
        self._live.start()
        self._show(done, total, {})

    def note(self, text: str) -> None:
        self._console.print(text, markup=False)

    def step(self, step: int, total: int, metrics: dict[str, float]) -> None:
        self._clock.tick()
        self._show(step, total, metrics)

    def end(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _show(self, step: int, total: int, metrics: dict[str, float]) -> None:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        bar = Table.grid(padding=(0, 2))
        eta = self._clock.remaining(total - step)
        bar.add_row(
            Text(f"step {step}/{total}"), ProgressBar(total=total, completed=step, width=40), Text(f"eta {eta}")
        )
        lines: list[Any] = [bar]
        if metrics:
            lines += [Text(headline(metrics), style="bold"), Text(phase_seconds(metrics), style="dim")]
        self._live.update(Group(*lines), refresh=True)
