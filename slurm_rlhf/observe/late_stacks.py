"""A stack that appears when nobody puts it off any longer, also while a call into C holds the interpreter's lock.

`faulthandler.dump_traceback_later` is made for that and not used: its thread reads the frames of all others without a
lock. Where Python runs nevertheless, and the timer was only late (a busy machine, a long import, a process that was
stopped and goes on), it reads frames that are gone, and the process that it should describe ends by SIGSEGV. Here a
timer of the kernel interrupts the thread itself, which then writes its own stack: its frames do not move meanwhile.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import threading
from collections.abc import Iterable
from functools import cache
from typing import ClassVar

SIGNAL = signal.SIGRTMAX - 3
"""Interrupts a thread so that it writes its stack; neither Python, torch, MPI nor Slurm use it."""

_CLOCK_MONOTONIC = 1
_SIGEV_THREAD_ID = 4
_STDERR = 2


class _Event(ctypes.Structure):
    """The kernel's `sigevent`: 64 bytes."""

    _fields_: ClassVar = [
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("thread", ctypes.c_int),
        ("rest", ctypes.c_char * 44),
    ]


class _Times(ctypes.Structure):
    """The kernel's `itimerspec`: repeated after, expires after; each in seconds and nanoseconds."""

    _fields_: ClassVar = [(name, ctypes.c_long) for name in ("again_s", "again_ns", "after_s", "after_ns")]


class LateStacks:
    """Timers of one process. `put_off` starts them, and starts them anew; a forked child begins without any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = 0
        self._timers: dict[int, ctypes.c_void_p] = {}  # by the kernel's number of the thread

    def put_off(self, within_s: float, threads: Iterable[threading.Thread] | None = None) -> None:
        """Have `threads` write their stacks to standard error in so many seconds, unless this is called again before.

        threads: those that run Python; None: the main thread. Without timers (a sandbox may refuse them) it does
        nothing: then a process whose lock is held has no stack in its log, and works as well as with one.
        """
        found = [threading.main_thread()] if threads is None else [*threads]
        # A forked child's main thread still has the number of its parent's.
        first, own = threading.main_thread(), os.getpid()
        alive = [own if thread is first else thread.native_id for thread in found if thread.is_alive()]
        numbers = [number for number in alive if number is not None]
        with self._lock:
            self._begin()
            for gone in self._timers.keys() - set(numbers):
                _timers().timer_delete(self._timers.pop(gone))
            for number in numbers:
                if number not in self._timers and (made := _made(number)) is not None:
                    self._timers[number] = made
                if number in self._timers:
                    _start(self._timers[number], within_s)

    def stop(self) -> None:
        """Have no stack written."""
        with self._lock:
            self._begin()
            for timer in self._timers.values():
                _start(timer, 0.0)

    def _begin(self) -> None:
        if self._pid != os.getpid():
            self._pid, self._timers = os.getpid(), {}
            # Of the interrupted thread alone: while it stands, the others may run.
            faulthandler.register(SIGNAL, file=_STDERR, all_threads=False)


@cache
def _timers() -> ctypes.CDLL:
    """Return the library with the kernel's timers; glibc before 2.34 has them in one of their own."""
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "timer_create") else ctypes.CDLL("librt.so.1")


def _made(thread: int) -> ctypes.c_void_p | None:
    """Make a timer that interrupts the thread of this number; None: the thread has ended, or no timer can be had."""
    event = _Event(signo=SIGNAL, notify=_SIGEV_THREAD_ID, thread=thread)
    timer = ctypes.c_void_p()
    failed = _timers().timer_create(_CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer))
    return None if failed else timer


def _start(timer: ctypes.c_void_p, after_s: float) -> None:
    """Let the timer expire once, after so many seconds; 0: stop it."""
    seconds = int(after_s)
    times = _Times(0, 0, seconds, int((after_s - seconds) * 1e9))
    _timers().timer_settime(timer, 0, ctypes.byref(times), None)
