"""Keep what a reward function prints out of the progress display: in a file of the run's logs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

_LOCK = threading.Lock()
_STREAMS = ("stdout", "stderr")


class _Divided:
    """Stands for stdout or stderr: what threads inside `printed_to` write goes to their file, the rest on."""

    def __init__(self, rest: TextIO) -> None:
        self.rest = rest
        self.mine = threading.local()
        self.users = 0

    def write(self, text: str) -> int:
        target: TextIO = getattr(self.mine, "file", None) or self.rest
        return target.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rest, name)


@contextmanager
def printed_to(path: Path) -> Iterator[None]:
    """Append what this thread prints to `path`, until the block ends; other threads print as before.

    Threads and processes that the block starts print as before, too.
    """
    with path.open("a", encoding="utf-8", errors="replace", buffering=1) as file:
        divided = [_enter(name, file) for name in _STREAMS]
        try:
            yield
        finally:
            for name, stream in zip(_STREAMS, divided, strict=True):
                _leave(name, stream)


def _enter(name: str, file: TextIO) -> _Divided:
    with _LOCK:
        stream = getattr(sys, name)
        if not isinstance(stream, _Divided):
            stream = _Divided(stream)
            setattr(sys, name, stream)
        stream.users += 1
    stream.mine.file = file
    return stream


def _leave(name: str, stream: _Divided) -> None:
    stream.mine.file = None
    with _LOCK:
        stream.users -= 1
        if not stream.users and getattr(sys, name) is stream:
            setattr(sys, name, stream.rest)
