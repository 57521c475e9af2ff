"""The seam between the conductor and whatever starts processes: local subprocesses, srun steps, MPI ranks."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Ended:
    """A process group of a role has ended, for whatever reason."""

    role: str
    node: str  # where it ended; a list of nodes where the launcher cannot tell which came first
    how: str  # "ended with status 1", "was killed by SIGKILL"
    log: Path  # what the launcher itself had to say


class Launcher(Protocol):
    """Starts the roles of one rank map. Created by the command line, used by the conductor's `Supervisor`."""

    @property
    def address(self) -> str:
        """Where this process is reached from the nodes of the run; loopback if all of them are this machine."""

    def start(self, role: str, arguments: list[str], environment: Mapping[str, Mapping[str, str]]) -> None:
        """Start `role` on all its nodes, with the variables of `environment[node]`.

        The conductor calls it once a role, from its main thread; it does not wait for the role.
        """

    def ended(self) -> list[Ended]:
        """Process groups that ended since the last call, in order. Polled by the fleet's thread; does not block."""

    def stop(self, done: bool, grace_s: float) -> None:
        """End every process of every role, and wait until they are gone: a little longer than `grace_s`.

        done: the ranks said that they have closed what they hold, and are leaving.
        """


def exit_text(code: int) -> str:
    """How a process ended whose exit status is `code`, negative for a signal."""
    if code >= 0:
        return f"ended with status {code}"
    return f"was killed by {signal.Signals(-code).name}"
