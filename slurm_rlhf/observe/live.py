"""Show progress on a terminal: one row per step, above a bar with the current phase."""

from __future__ import annotations

import sys
import time
from threading import Lock

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from slurm_rlhf.config.schema import Logger
from slurm_rlhf.observe.progress import Cell, PlainProgress, Progress, count, duration

_REFRESH_HZ = 2
_BAR = 32  # columns at most
_TEXT = 52  # columns for the text after the bar
_BUSY = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


class LiveProgress(PlainProgress):
    """Show rows and a bar with rich. All other output appears above the bar."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        super().__init__()
        self._live: Live | None = None
        self._done = self._total = 0
        self._phase = ""
        self._phase_began = 0.0
        self._expected = 0  # responses of the phase
        self._lock = Lock()
        self._answered = self._tokens = 0

    @property
    def _width(self) -> int:
        return self._console.width

    def begin(self, done: int, total: int) -> None:
        super().begin(done, total)
        self._done, self._total = done, total
        self._live = Live(
            get_renderable=self._footer, console=self._console, refresh_per_second=_REFRESH_HZ, transient=True
        )
        self._live.start(refresh=True)

    def phase(self, name: str, responses: int = 0) -> None:
        with self._lock:
            self._phase, self._phase_began, self._expected = name, time.monotonic(), responses
            self._answered = self._tokens = 0

    def answered(self, responses: int, tokens: int) -> None:
        with self._lock:
            self._answered += responses
            self._tokens += tokens

    def note(self, text: str) -> None:
        self._console.print(Text(text))

    def step(self, step: int, total: int, metrics: dict[str, float]) -> None:
        self._done, self._total = step, total
        super().step(step, total, metrics)
        if self._live is not None:
            self._live.refresh()

    def end(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _show(self, cells: list[Cell]) -> None:
        text = Text(" ").join(Text(cell.text, style=cell.style) for cell in cells)
        self._console.print(text, no_wrap=True, overflow="crop", crop=True)

    def _footer(self) -> RenderableType:
        """Draw the bars. A thread of rich calls this, so that times go on while the main thread waits."""
        left = self._clock.remaining(self._total - self._done) - self._clock.since_tick()
        now = time.monotonic()
        busy = _BUSY[int(now * _REFRESH_HZ) % len(_BUSY)]
        run = self._line(
            f"{self._done}/{self._total}",
            self._done,
            self._total,
            f"{duration(self._clock.elapsed())} elapsed, {duration(max(left, 0.0))} left",
            f"{busy} {self._phase} {duration(now - self._phase_began)}" if self._phase else "",
        )
        with self._lock:
            done, expected, tokens = self._answered, self._expected, self._tokens
            seconds = now - self._phase_began
        if not (self._phase and (done or expected)):
            return run
        whole = f"{done}/{expected}" if expected else str(done)
        rate = f"responses, {count(tokens / max(seconds, 1e-3), 6).strip()} tokens/s"
        return Group(run, self._line(whole, done, expected, rate, ""))

    def _line(self, name: str, done: int, total: int, text: str, dim: str) -> RenderableType:
        width = max(4, min(_BAR, self._console.width - _TEXT))
        bar: RenderableType = Text(" " * width)
        if total:
            # More responses than expected: prompts may be sampled ahead.
            completed = min(done, total)
            bar = ProgressBar(total, completed, width, complete_style="green", finished_style="green")
        line = Table.grid(padding=(0, 1))
        line.add_row(Text(name.rjust(9), style="bold"), bar, Text(text, style="cyan"), Text(dim, style="dim"))
        return line


def make_progress(settings: Logger) -> Progress:
    """Make the display that `logger.progress` names; auto: rich if standard output is a terminal."""
    kind = settings.progress
    if kind == "auto":
        kind = "rich" if sys.stdout.isatty() else "plain"
    if kind == "rich":
        return LiveProgress()
    return PlainProgress() if kind == "plain" else Progress()
