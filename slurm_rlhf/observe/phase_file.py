"""Tell other processes which phase a run is in: one short line in a file, written over again at each phase."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

_WIDTH = 128
"""Bytes of the line, blanks included: one write, so that a reader on this machine sees a whole one."""


@dataclass(frozen=True, slots=True)
class PhaseNow:
    """Says in which phase a run is after `step` steps, since the Unix time `since`; empty: between two phases."""

    phase: str
    step: int
    since: float


class PhaseFile:
    """Writes the file. It costs a microsecond where the disk is local, and no inode but its own."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None

    def tell(self, phase: str, step: int) -> None:
        """Note the phase that begins. Raises OSError."""
        if self._file is None:
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        line = json.dumps({"phase": phase, "step": step, "since": round(time.time(), 3)})
        os.pwrite(self._file, line.ljust(_WIDTH).encode() + b"\n", 0)


def read_phase(path: Path) -> PhaseNow | None:
    """Read the file; None where there is none, or none that can be read."""
    try:
        return PhaseNow(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
