"""Show progress on a terminal: one row per step, above a bar that shows the current phase."""

from __future__ import annotations

import sys
import time

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from slurm_rlhf.config.schema import Logger
from slurm_rlhf.observe.progress import Cell, Clock, Headers, PlainProgress, Progress, duration, row

_REFRESH_HZ = 2
_BAR = 32  # columns
_BUSY = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


class LiveProgress(Progress):
    """Show rows and a bar with rich. Whatever else is printed meanwhile appears above the bar."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._clock = Clock()
        self._live: Live | None = None
        self._headers = Headers()
        self._done = self._total = 0
        self._phase = ""
        self._phase_began = 0.0

    def begin(self, done: int, total: int) -> None:
        self._clock.tick()
        self._done, self._total = done, total
        self._live = Live(
            get_renderable=self._footer, console=self._console, refresh_per_second=_REFRESH_HZ, transient=True
        )
        self._live.start(refresh=True)

    def phase(self, name: str) -> None:
        self._phase, self._phase_began = name, time.monotonic()

    def note(self, text: str) -> None:
        self._console.print(Text(text))

    def step(self, step: int, total: int, metrics: dict[str, float]) -> None:
        self._clock.tick()
        self._done, self._total = step, total
        if names := self._headers.before(metrics):
            self._print(Text(names, style="underline dim"))
        self._print(_styled(row(step, total, metrics, duration(self._clock.remaining(total - step)))))
        if "eval" in metrics:
            self._print(Text(f"{'':9} evaluation {metrics['eval']:.4f}", style="bold magenta"))
        if self._live is not None:
            self._live.refresh()

    def end(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print(self, text: Text) -> None:
        self._console.print(text, no_wrap=True, overflow="crop", crop=True)

    def _footer(self) -> RenderableType:
        """Draw the bar. Rich's thread calls this, so its times go on while the main thread waits."""
        bar = Table.grid(padding=(0, 1))
        left = self._clock.remaining(self._total - self._done) - self._clock.since_tick()
        now = time.monotonic()
        busy = _BUSY[int(now * _REFRESH_HZ) % len(_BUSY)]
        bar.add_row(
            Text(f"{self._done}/{self._total}".rjust(9), style="bold"),
            ProgressBar(
                total=max(1, self._total),
                completed=self._done,
                width=_BAR,
                complete_style="green",
                finished_style="green",
            ),
            Text(f"{duration(self._clock.elapsed())} elapsed, {duration(max(left, 0.0))} left", style="cyan"),
            Text(f"{busy} {self._phase} {duration(now - self._phase_began)}" if self._phase else "", style="dim"),
        )
        return bar


def _styled(cells: list[Cell]) -> Text:
    return Text(" ").join(Text(cell.text, style=cell.style) for cell in cells)


def make_progress(settings: Logger) -> Progress:
    """Make the kind that `logger.progress` names; auto: rich if standard output is a terminal."""
    kind = settings.progress
    if kind == "auto":
        kind = "rich" if sys.stdout.isatty() else "plain"
    if kind == "rich":
        return LiveProgress()
    return PlainProgress() if kind == "plain" else Progress()
