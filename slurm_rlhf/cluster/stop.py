"""When a run has to stop before its last step: signals, the end of the allocation, files of the user's.

A stop may drop work in flight only where the code says so (`droppable`); elsewhere it waits for the next such place.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

STOP_FILE = "stop"
SAVE_FILE = "save"
_POLL_S = 1.0
_SECOND_TERM_S = 2.0


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a run stops."""

    what: str
    requeue: bool  # the run is to go on later by itself
    exit_code: int


USR1 = Reason("SIGUSR1: the end of the allocation is near", True, 0)
TERM = Reason("SIGTERM", False, 128 + signal.SIGTERM)
END = Reason("the end of the allocation is near", True, 0)
FILE = Reason(f"a file named {STOP_FILE} in the run directory", False, 0)


@contextmanager
def termination() -> Iterator[threading.Event]:
    """An event that SIGTERM sets, instead of whatever else it would do. Only the main thread may enter it."""
    told = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda number, frame: told.set())
    try:
        yield told
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def immune() -> Iterator[None]:
    """What this thread starts meanwhile is not ended by SIGTERM: Slurm signals every process of a batch step."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class StopRequested(BaseException):
    """Raised in the main thread, where work in flight may be dropped. Not an Exception: nothing may swallow it."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.what)
        self.reason = reason


class Stop:
    """Listens while it is entered. Only the main thread may enter it.

    SIGUSR1 (`sbatch --signal=B:USR1@600`) and the time `end` (seconds since the epoch) less `margin_s` mean: save,
    and go on in another allocation. SIGTERM means: save now; the second one ends the process without more ado. The
    file `stop` in `directory` means: save and leave; the file `save`: save and go on.
    """

    def __init__(self, directory: Path, end: float | None = None, margin_s: float = 0.0) -> None:
        self.reason: Reason | None = None
        self._directory = directory
        self._end = end
        self._margin_s = margin_s
        self._droppable = False
        self._term_at = 0.0
        self._leaving = threading.Event()

    def __enter__(self) -> Stop:
        # A file of an earlier session has been obeyed already.
        (self._directory / STOP_FILE).unlink(missing_ok=True)
        self._before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)}
        signal.signal(signal.SIGUSR1, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_signal)
        threading.Thread(target=self._watch, name="stop-watch", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def droppable(self) -> Iterator[None]:
        """Within it a stop raises StopRequested at once, and at its begin if one was asked for before."""
        self._droppable = True
        try:
            self.check()
            yield
        finally:
            self._droppable = False

    def check(self) -> None:
        """Raise StopRequested if a stop was asked for."""
        if self.reason is not None:
            raise StopRequested(self.reason)

    def save_wanted(self) -> bool:
        """True once for each `save` file."""
        file = self._directory / SAVE_FILE
        wanted = file.exists()
        file.unlink(missing_ok=True)
        return wanted

    def deaf(self) -> None:
        """From here on no signal keeps the caller from ending what was started."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            # One scancel or `timeout` can deliver it twice.
            if self.reason is TERM and time.monotonic() > self._term_at + _SECOND_TERM_S:
                raise SystemExit(TERM.exit_code)
            if self.reason is not TERM:
                self.reason, self._term_at = TERM, time.monotonic()
        elif self.reason is None:
            self.reason = USR1
        if self._droppable:
            self._droppable = False
            self.check()

    def _watch(self) -> None:
        while not self._leaving.wait(_POLL_S):
            if self.reason is not None:
                continue
            if (self._directory / STOP_FILE).exists():
                self._ask(FILE)
            elif self._end is not None and time.time() > self._end - self._margin_s:
                self._ask(END)

    def _ask(self, reason: Reason) -> None:
        """Only a signal interrupts the main thread where it waits."""
        self.reason = reason
        os.kill(os.getpid(), signal.SIGUSR1)
