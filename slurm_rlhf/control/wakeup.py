"""Wakes the I/O thread from any other thread."""

from __future__ import annotations

import contextlib
import os
import threading


class Wakeup:
    """A pipe that the I/O thread polls next to its sockets, which only that thread may touch."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # Without it a signal could reach a descriptor that was closed and given to somebody else meanwhile.
        self._lock = threading.Lock()
        self._closed = False

    def fileno(self) -> int:
        """What to poll for reading."""
        return self._read

    def signal(self) -> None:
        """Any thread: the I/O thread's poll returns. Does nothing after close."""
        with self._lock:
            # A full pipe wakes as well as one more byte would.
            if not self._closed:
                with contextlib.suppress(BlockingIOError):
                    os.write(self._write, b"\0")

    def clear(self) -> None:
        """I/O thread: forget the signals so far; call it before looking at what was queued."""
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._read, 4096)) == 4096:
                pass

    def close(self) -> None:
        """I/O thread, at its end."""
        with self._lock:
            self._closed = True
            os.close(self._read)
            os.close(self._write)
