"""Show progress on a terminal: one row per step, above bars of the run and of its phase."""

from __future__ import annotations

import sys
import time
from threading import Lock

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.text import Text

from slurm_rlhf.config.schema import Logger
from slurm_rlhf.observe.progress import Cell, PlainProgress, Progress, count, duration

_BAR = 32  # columns


class LiveProgress(PlainProgress):
    """Show rows and bars with rich. All other output appears above the bars."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        super().__init__()
        name, text = TextColumn("[bold]{task.fields[done]:>9}"), TextColumn("[cyan]{task.description}")
        columns = (name, BarColumn(_BAR), TimeElapsedColumn(), text)
        self._bars = Bars(*columns, console=self._console, refresh_per_second=2, transient=True)
        self._run, self._phase = (self._bars.add_task("", visible=False, done="") for _ in range(2))
        self._lock = Lock()
        self._name, self._of = "", ""  # the phase's name, and the count of responses that it will have
        self._began = 0.0
        self._answered = self._tokens = 0

    @property
    def _width(self) -> int:
        return self._console.width

    def begin(self, done: int, total: int) -> None:
        super().begin(done, total)
        self._bars.reset(self._run, total=total, visible=True, description="elapsed")
        self._bars.update(self._run, completed=done, done=f"{done}/{total}")
        self._bars.start()

    def phase(self, name: str, responses: int = 0) -> None:
        with self._lock:
            self._name, self._of, self._began = name, f"/{responses}" if responses else "", time.monotonic()
            self._answered = self._tokens = 0
            self._bars.remove_task(self._phase)
            self._phase = self._bars.add_task(name, total=responses or None, visible=bool(name), done="")

    def answered(self, responses: int, tokens: int) -> None:
        with self._lock:
            self._answered += responses
            self._tokens += tokens
            rate = count(self._tokens / max(time.monotonic() - self._began, 1e-3), 6).strip()
            done, text = f"{self._answered}{self._of}", f"{self._name}, {rate} tokens/s"
            self._bars.update(self._phase, completed=self._answered, description=text, done=done)

    def note(self, text: str) -> None:
        self._console.print(Text(text))

    def step(self, step: int, total: int, metrics: dict[str, float]) -> None:
        super().step(step, total, metrics)
        left = f"elapsed, {duration(self._clock.remaining(total - step))} left"
        self._bars.update(self._run, completed=step, done=f"{step}/{total}", description=left, refresh=True)

    def end(self) -> None:
        self._bars.stop()

    def _show(self, cells: list[Cell]) -> None:
        text = Text(" ").join(Text(cell.text, style=cell.style) for cell in cells)
        self._console.print(text, no_wrap=True, overflow="crop", crop=True)


def make_progress(settings: Logger) -> Progress:
    """Make the display that `logger.progress` names; auto: rich if standard output is a terminal."""
    kinds: dict[str, type[Progress]] = {"rich": LiveProgress, "plain": PlainProgress, "none": Progress}
    kinds["auto"] = LiveProgress if sys.stdout.isatty() else PlainProgress
    return kinds[settings.progress]()
