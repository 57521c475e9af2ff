"""Signals that end a training behind the step in progress, so that it is saved first."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

WORDS = {
    signal.SIGTERM: "SIGTERM",
    signal.SIGINT: "Ctrl-C",
    signal.SIGUSR1: "SIGUSR1: the end of the allocation is near",
}


class StopSignals:
    """Remembers the first signal, inside a `with` block; a second one does what it does by itself."""

    def __init__(self) -> None:
        self.number = 0
        """Of the signal that has come; 0: none."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._came) for number in WORDS}
        return self

    def _came(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._restore()


def told(number: int) -> str:
    """Say which signal it was; another rank may have had it."""
    return WORDS.get(signal.Signals(number), "a signal") if number else "a signal to another rank"


def exit_code(number: int) -> int:
    """Return the exit code of a training that was stopped: that of `slurm-rlhf train`, 0 where the allocation ends."""
    return 0 if number == signal.SIGUSR1 else 128 + (number or signal.SIGTERM)
