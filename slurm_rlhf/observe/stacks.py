"""Take stacks: of this process, from the output of faulthandler, and of a process that hangs.

A rank that hangs writes its own stacks, even while a call into C holds the interpreter's lock (GIL).
`faulthandler.dump_traceback_later` is made for that, but its thread reads the frames of all others without a lock. If
Python does run, and only the timer was late (a busy machine, a long import, a process that was stopped and goes on), it
reads frames that are gone, and the process ends by SIGSEGV. A signal handler reads the frames of its own thread only,
but even these are incomplete for a moment at the beginning of a call. So there are two kernel timers. At the first one
Python writes the stacks, if it runs, and stops the second one. If the second one expires, each thread is in C, where
its frames do not change, and faulthandler's signal handler reads them.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import re
import signal
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import ClassVar

MAIN = "MainThread"
"""Name of a process's first thread, as in `threading`."""
LATE = re.compile(r"^(?=Stack \(most recent call first\):$)", re.MULTILINE)
"""First line of a stack that a thread has written by order of `LateStacks`."""

_THREAD = re.compile(r"^(?:Current thread|Thread|(?=Stack)) ?(?P<name>.+?) \(most recent call first\):$")
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')


@dataclass(frozen=True, slots=True)
class Frame:
    """Describe a call in a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f'  File "{self.file}", line {self.line} in {self.function}'


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """Hold the stack of one thread, the innermost call first."""

    name: str
    frames: tuple[Frame, ...]

    def __str__(self) -> str:
        return "\n".join([f"Thread {self.name} (most recent call first):", *map(str, self.frames)])


def late_s(heartbeat_s: float) -> float:
    """Return the seconds without a heartbeat after which a rank writes its stacks, long before it counts as lost."""
    return heartbeat_s / 4


def own_stacks() -> list[ThreadStack]:
    """Take the stacks of all threads of this process, the main thread first."""
    descriptor = os.memfd_create("stacks")
    with open(descriptor, "r+b") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read().decode("utf-8", errors="replace")
    for thread in threading.enumerate():
        if thread.ident is not None:
            text = text.replace(f"hread 0x{thread.ident:016x} (", f"hread {thread.name} (")
    return read_stacks(text)


def written(threads: Sequence[ThreadStack]) -> str:
    """Write stacks in the format of faulthandler."""
    return "\n\n".join(map(str, threads))


def read_stacks(text: str) -> list[ThreadStack]:
    """Read what `written` or faulthandler wrote, the main thread first; skip other text.

    Faulthandler writes no names of threads, and the main thread last.
    """
    found: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        if begins := _THREAD.match(line):
            found.append((begins["name"], []))
        elif found and (call := _FRAME.match(line)):
            found[-1][1].append(Frame(call["file"], int(call["line"]), call["function"]))
    threads = [ThreadStack(name, tuple(frames)) for name, frames in found]
    if threads and not any(thread.name == MAIN for thread in threads):
        threads = [ThreadStack(MAIN, threads[-1].frames), *threads[:-1]]
    return sorted(threads, key=lambda thread: thread.name != MAIN)


def last_late_dump(log: str) -> str:
    """Return the stack by `LateStacks` at the end of a log; empty if the log does not end with one.

    If the process has written more after a stack, it has gone on, and the stack is out of date.
    """
    marks = list(LATE.finditer(log))
    if not marks:
        return ""
    lines = []
    for line in log[marks[-1].end() :].strip("\n").splitlines():
        if line and not (_THREAD.match(line) or _FRAME.match(line)) and not line.startswith("  "):
            return ""
        lines.append(line)
    return "\n".join(lines).strip("\n")


SIGNAL = signal.SIGRTMAX - 3
"""Signal at which a thread writes its stack; Python, torch, MPI and Slurm do not use it."""
_FIRST = signal.SIGRTMAX - 4
"""Signal at which Python writes the stacks, if it runs."""

_GRACE_S = 1.0
"""Time that Python has to write the stacks, before each thread writes its own."""
_SIGEV_THREAD_ID = 4
_STDERR = 2


class _Event(ctypes.Structure):
    """Hold the kernel's `sigevent`, 64 bytes."""

    _fields_: ClassVar = [
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("thread", ctypes.c_int),
        ("rest", ctypes.c_char * 44),
    ]


class _Times(ctypes.Structure):
    """Hold the kernel's `itimerspec`: period and first expiry, each in seconds and nanoseconds."""

    _fields_: ClassVar = [(name, ctypes.c_long) for name in ("again_s", "again_ns", "after_s", "after_ns")]


class LateStacks:
    """Makes threads of this process write their stacks when `put_off` has not been called for some time.

    Create it in the main thread, once per process.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: the handler `_write` may interrupt the main thread anywhere
        self._pid = 0
        self._timers: dict[tuple[int, int], ctypes.c_void_p] = {}  # by the kernel's id of the thread, and the signal
        self._threads: list[threading.Thread] = []
        self._due = 0.0

    def put_off(self, within_s: float, threads: Iterable[threading.Thread] | None = None) -> None:
        """Let `threads` write their stacks to standard error after `within_s`, unless this is called again before.

        `threads`: threads that run Python; None: the main thread. They write a second later where Python does not run.
        Does nothing if timers are refused, as in a sandbox.
        """
        found = [threading.main_thread()] if threads is None else [*threads]
        # In a forked child the main thread still has the id of the parent's.
        first, own = threading.main_thread(), os.getpid()
        with self._lock:
            self._begin()
            self._threads = [thread for thread in found if thread.is_alive()]
            self._due = time.monotonic() + within_s
            numbers = [own if thread is first else thread.native_id for thread in self._threads]
            wanted = [(number, SIGNAL) for number in numbers if number is not None]
            if signal.getsignal(_FIRST) == self._write:
                wanted.append((own, _FIRST))
            for gone in self._timers.keys() - set(wanted):
                _timers().timer_delete(self._timers.pop(gone))
            for key in wanted:
                if key not in self._timers and (made := _made(*key)) is not None:
                    self._timers[key] = made
                if key in self._timers:
                    _start(self._timers[key], within_s if key[1] == _FIRST else within_s + _GRACE_S)

    def stop(self) -> None:
        """Stop all timers."""
        with self._lock:
            self._begin()
            for timer in self._timers.values():
                _start(timer, 0.0)

    def _begin(self) -> None:
        if self._pid != os.getpid():
            self._pid, self._timers = os.getpid(), {}
            # Only the interrupted thread: the others may run meanwhile.
            faulthandler.register(SIGNAL, file=_STDERR, all_threads=False)
            if threading.current_thread() is threading.main_thread():
                signal.signal(_FIRST, self._write)
                signal.siginterrupt(_FIRST, False)

    def _write(self, number: int, interrupted: FrameType | None) -> None:
        """Write the stacks as faulthandler does: Python runs, and frames do not move while it runs this."""
        if time.monotonic() > self._due + _GRACE_S:
            return  # Python runs again, and the threads have written their stacks
        self.stop()
        watched = {thread.name for thread in self._threads}
        for stack in own_stacks():
            if stack.name in watched:
                frames = [frame for frame in stack.frames if frame.file != __file__]
                os.write(_STDERR, "\n".join(["Stack (most recent call first):", *map(str, frames), ""]).encode())


@cache
def _timers() -> ctypes.CDLL:
    """Return the library with the kernel's timers; before glibc 2.34 it is one of its own."""
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "timer_create") else ctypes.CDLL("librt.so.1")


def _made(thread: int, number: int) -> ctypes.c_void_p | None:
    """Make a timer that interrupts a thread by a signal; None if the thread has ended or the system refuses."""
    event = _Event(signo=number, notify=_SIGEV_THREAD_ID, thread=thread)
    timer = ctypes.c_void_p()
    failed = _timers().timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer))
    return None if failed else timer


def _start(timer: ctypes.c_void_p, after_s: float) -> None:
    """Let the timer expire once, after `after_s` seconds; 0: stop it."""
    seconds = int(after_s)
    times = _Times(0, 0, seconds, int((after_s - seconds) * 1e9))
    _timers().timer_settime(timer, 0, ctypes.byref(times), None)
