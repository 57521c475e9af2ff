"""Files that hold a run up, or make its code fail, while they are there: the code of `workload` looks for them."""

from __future__ import annotations

import os
from pathlib import Path

HOLD = "hold"
"""Directory of the files, next to the configuration of the run."""
LOCK = "lock"
"""A pipe instead of a file: what reads from it keeps the interpreter's lock until the pipe is written to."""


class Holds:
    """The files of one run."""

    def __init__(self, config: Path) -> None:
        """`config`: the file of the run's configuration."""
        self._path = config.parent / HOLD
        self._path.mkdir(exist_ok=True)

    def hold(self, place: str, text: str = "") -> None:
        """From now on, whoever comes to `place` stays there, or fails; `text`: what it reads. Raises OSError."""
        if place == LOCK:
            os.mkfifo(self._path / place)
        else:
            (self._path / place).write_text(text, encoding="utf-8")

    def let_go(self, place: str) -> None:
        """Let them go on; nothing where nobody is held."""
        file = self._path / place
        if place == LOCK and file.exists():
            end = os.open(file, os.O_RDWR | os.O_NONBLOCK)  # the reader may be gone
            file.unlink()
            os.close(end)
        file.unlink(missing_ok=True)

    def clear(self) -> None:
        """Let everybody go on."""
        for file in self._path.iterdir():
            self.let_go(file.name)
