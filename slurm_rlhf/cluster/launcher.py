"""The seam between the conductor and whatever starts processes: local subprocesses, srun steps, MPI ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Ended:
    """A process group that has ended, for whatever reason."""

    role: str
    node: str
    code: int  # exit status; negative: the signal that ended it
    log: Path  # what the launcher itself had to say


class Launcher(Protocol):
    """Five methods; none blocks for longer than it takes to start or signal a process."""

    def start(self, role: str, processes: int, arguments: list[str], environment: Mapping[str, str]) -> None:
        """Start one process group of `role`. The conductor calls it once a role, from its main thread."""

    def ended(self) -> list[Ended]:
        """Process groups that ended since the last call."""

    def running(self) -> int:
        """Process groups still alive."""

    def terminate(self) -> None:
        """Ask every process group to end (SIGTERM or its like)."""

    def kill(self) -> None:
        """End every process group now, with all of its processes, and wait until they are gone."""
