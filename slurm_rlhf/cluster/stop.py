"""Stop a run before its last step, by signals, time or files of the user, and continue it later.

A stop may drop work in flight only inside `droppable`; elsewhere it waits until the code enters such a block.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from slurm_rlhf.wire import timeouts


class Arrangement(NamedTuple):
    """Say how a run continues after a stop."""

    text: str
    sure: bool  # False: nothing could be arranged, and the user has to act


class Continuation:
    """Make a scheduler continue a run. This class leaves that to the user; `nodes.requeue` has subclasses for Slurm."""

    def end_time(self) -> float | None:
        """Return the end of the allocation in seconds since the epoch; None if unknown. Asks the scheduler once."""
        return None

    def go_on(self) -> Arrangement:
        """Arrange that the same job runs again, or return why that is not possible.

        The scheduler may end this process before this returns, so everything must be on disk before.
        """
        return Arrangement("the same command goes on from here", True)

    def finished(self) -> str:
        """Cancel the arrangement, because the run is done; return what was cancelled, empty if nothing was."""
        return ""


STOP_FILE = "stop"
SAVE_FILE = "save"
_POLL_S = 1.0
_TAKEN = (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_KICK = signal.SIGURG
"""Signal without effect, except that it interrupts a wait of the main thread."""
_SAVES = b"\nCtrl-C: the run saves and ends; press it again to end it at once\n"


@dataclass(frozen=True, slots=True)
class Reason:
    """Say why a run stops."""

    what: str
    requeue: bool  # True: the run continues later by itself
    exit_code: int


USR1 = Reason("SIGUSR1: the end of the allocation is near", True, 0)
TERM = Reason("SIGTERM", False, 128 + signal.SIGTERM)
HANGUP = Reason("SIGHUP: the terminal is gone", False, 128 + signal.SIGHUP)
INTERRUPT = Reason("Ctrl-C", False, 128 + signal.SIGINT)
END = Reason("the end of the allocation is near", True, 0)
FILE = Reason(f"a file named {STOP_FILE} in the run directory", False, 0)
NOT_ARRANGED = 1
"""Exit code if a run should continue by itself and cannot: a job with `afterok` must not start."""

_early = threading.Event()
"""Set if SIGUSR1 came before a Stop was entered."""


def note_early() -> None:
    """Remember a SIGUSR1 until the first Stop, so that it does not end this process. Only the main thread may call it.

    While the interpreter ends, SIGUSR1 is ignored: `scancel --signal` on a task of an array repeats it until the end.
    """
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, lambda number, frame: _early.set())
        atexit.register(signal.signal, signal.SIGUSR1, signal.SIG_IGN)


@contextmanager
def handled(numbers: Iterable[int], how: Callable[[int, FrameType | None], None] | signal.Handlers) -> Iterator[None]:
    """Handle signals as `how` says inside the block. Only the main thread may enter it."""
    before = {number: signal.signal(number, how) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def termination() -> Iterator[threading.Event]:
    """Make SIGTERM only set the event inside the block. Only the main thread may enter it."""
    came = threading.Event()
    with handled([signal.SIGTERM], lambda number, frame: came.set()):
        yield came


@contextmanager
def immune() -> Iterator[None]:
    """Block SIGTERM in processes that this thread starts in the block: Slurm signals all processes of a batch step."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class StopRequested(BaseException):
    """Interrupt the main thread where work may be dropped. Not an Exception, so that no handler catches it."""

    def __init__(self, reason: Reason, saved: bool = True) -> None:
        """`saved`: the run saves all work so far before it ends."""
        super().__init__(reason.what)
        self.reason = reason
        self.saved = saved


class Stop:
    """Notice requests to stop inside the block. Only the main thread may enter it.

    SIGUSR1 (`sbatch --signal=B:USR1@600`) and the time `end` (seconds since the epoch) less `margin_s` mean: save,
    and continue in another allocation. SIGTERM, SIGHUP (not under nohup) and SIGINT (Ctrl-C) mean: save and end; a
    second SIGTERM or SIGINT ends the process at once. The file `stop` in `directory` means: save and end; the file
    `save`: save and continue.
    """

    def __init__(self, directory: Path, end: float | None = None, margin_s: float = 0.0) -> None:
        self.reason: Reason | None = None
        self._directory = directory
        # By time.monotonic(), because the clock of a node may be changed meanwhile.
        self._end = None if end is None else time.monotonic() + end - time.time()
        self._margin_s = margin_s
        self.can_drop = False
        """True while a stop takes effect at once."""
        self._term_at = 0.0
        self._leaving = threading.Event()

    def __enter__(self) -> Stop:
        # A file from an earlier session has had its effect already.
        _removed(self._directory / STOP_FILE)
        self._before = {number: signal.getsignal(number) for number in _TAKEN}
        for number, handler in self._before.items():
            if number != signal.SIGHUP or handler is not signal.SIG_IGN:  # nohup
                signal.signal(number, self._on_signal)
        if _early.is_set():
            _early.clear()
            self.reason = USR1
        self._before[_KICK] = signal.signal(_KICK, lambda number, frame: None)
        came, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        main = threading.get_ident()
        threading.Thread(target=self._watch, args=(came, main), name="stop-watch", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.set()
        signal.set_wakeup_fd(self._wakeup_before)
        self._wakeup.close()  # wakes the thread
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def droppable(self) -> Iterator[None]:
        """Make a stop raise StopRequested at once inside the block, or at its start if it was requested before."""
        self.can_drop = True
        try:
            self.check()
            yield
        finally:
            self.can_drop = False

    def check(self) -> None:
        """Raise StopRequested if a stop was requested."""
        if self.reason is not None:
            raise StopRequested(self.reason)

    def ask(self, reason: Reason) -> None:
        """Stop for `reason` unless a stop was requested before; from any thread, as a signal would."""
        if self.reason is None:
            self._ask(reason)

    def save_wanted(self) -> bool:
        """Tell whether the user has made a file `save`, and remove it."""
        return _removed(self._directory / SAVE_FILE)

    def ignore_signals(self) -> None:
        """Ignore signals from now on, so that the caller can end what it has started."""
        for number in _TAKEN:
            signal.signal(number, signal.SIG_IGN)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self.reason is INTERRUPT:
                raise KeyboardInterrupt
            self.reason = INTERRUPT
            os.write(2, _SAVES)  # not print: the signal may have interrupted one
        elif number == signal.SIGTERM:
            # One `scancel` or `timeout` can deliver SIGTERM twice.
            if self.reason is TERM and time.monotonic() > self._term_at + timeouts.SECOND_TERM_S:
                raise SystemExit(TERM.exit_code)
            if self.reason is not TERM:
                self.reason, self._term_at = TERM, time.monotonic()
        elif number == signal.SIGHUP:
            if self.reason is not TERM:
                self.reason = HANGUP
            _leave_terminal()
        elif self.reason is None:
            self.reason = USR1
        if self.can_drop:
            self.can_drop = False
            self.check()

    def _watch(self, came: socket.socket, main: int) -> None:
        """Look at clock and files every `_POLL_S`; `came` receives the numbers of signals, and is closed at the end."""
        came.settimeout(_POLL_S)
        while not self._leaving.is_set():
            with contextlib.suppress(TimeoutError):
                if set(came.recv(64)) - {_KICK}:
                    # Python's handler runs only when the main thread runs. If that thread begins a wait just when the
                    # signal comes, or if another thread gets the signal, a second signal has to end the wait.
                    self._leaving.wait(timeouts.SIGNAL_HANDLED_S)
                    if not self._leaving.is_set():
                        signal.pthread_kill(main, _KICK)
                continue
            if self.reason is not None:
                if self.can_drop:  # our own signal may be missed in the same way
                    os.kill(os.getpid(), signal.SIGUSR1)
                continue
            if os.path.exists(self._directory / STOP_FILE):  # unlike Path.exists, false where the disk fails
                self._ask(FILE)
            elif self._end is not None and time.monotonic() > self._end - self._margin_s:
                self._ask(END)
        came.close()

    def _ask(self, reason: Reason) -> None:
        """Send a signal to this process, because nothing else interrupts a wait of the main thread."""
        self.reason = reason
        os.kill(os.getpid(), signal.SIGUSR1)


def _leave_terminal() -> None:
    """Replace a terminal that is gone by /dev/null: printing to it would raise EIO."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(("/dev/pts/", "/dev/tty")):  # isatty is False for it
            os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _removed(file: Path) -> bool:
    """Remove a file; return False if there is none, or if the file system does not answer."""
    try:
        file.unlink()
    except OSError:
        return False
    return True
