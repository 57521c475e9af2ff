"""Define what a launcher does: the seam between the conductor and local processes, srun steps or MPI ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Ended:
    """Report that a process group of a role has ended, for whatever reason."""

    role: str
    node: str  # where it ended; a list of nodes if the launcher cannot tell which came first
    how: str  # "ended with status 1", "was killed by SIGKILL"
    log: Path  # what the launcher itself printed


class Launcher(Protocol):
    """Start the roles of one rank map. Created by the command line, used by the conductor's supervisor."""

    @property
    def address(self) -> str:
        """Return the address of this process for the nodes of the run; loopback if all of them are this machine."""

    def start(self, role: str, arguments: list[str], environment: Mapping[str, Mapping[str, str]]) -> None:
        """Start `role` on all its nodes, with the variables of `environment[node]`.

        The conductor calls it once for each role, from its main thread; it does not wait for the role.
        """

    def ended(self) -> list[Ended]:
        """Return the process groups that ended since the last call, in order. The supervisor's thread polls it."""

    def stop(self, done: bool, grace_s: float) -> None:
        """End every process of every role, and wait until they are gone: a little longer than `grace_s`.

        done: the ranks said that they have closed what they hold, and are leaving.
        """
