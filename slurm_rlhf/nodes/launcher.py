"""Define what a launcher does: the seam between the conductor and the processes of the roles.

There are two: `nodes.agent_launcher` (srun steps, or one machine) and `nodes.mpi.rank` (MPI ranks). Only the first
starts an engine again: a rank that is gone is missing in COMM_WORLD.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from slurm_rlhf.cluster.processes import KILLED
from slurm_rlhf.cluster.slurm_environment import expand
from slurm_rlhf.errors import PlacementError
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.wire import timeouts

if TYPE_CHECKING:
    from slurm_rlhf.nodes.agent_launcher import AgentEngines
    from slurm_rlhf.nodes.agent_steps import AgentServer

Environment = Mapping[str, Mapping[str, str]]
"""Node -> variables of its ranks."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Report that a process group of a role has ended, for whatever reason."""

    role: str
    node: str  # where it ended; a list of nodes if the launcher cannot tell which came first
    how: str  # "ended with status 1", "was killed by SIGKILL"
    log: Path  # file with the launcher's own output


def names_in(nodes: str) -> list[str]:
    """List the nodes in a host list of an `Ended` or of srun; text that is no host list is returned as it is."""
    try:
        return expand(nodes)
    except PlacementError:
        return [nodes]


class Launcher(Protocol):
    """Start the roles of one rank map. Created by the command line, used by the conductor's supervisor."""

    fixed: str
    """Why no role can be started again; empty: roles can."""

    unfit: Mapping[str, str]
    """Node of the allocation without ranks -> why none may move to it."""

    @property
    def agents(self) -> AgentServer:
        """Return the agents of the nodes. Any thread may ask them."""

    @property
    def address(self) -> str:
        """Return the address of this process for the run's nodes; loopback if all are this machine."""

    @property
    def engines(self) -> AgentEngines | None:
        """Return the engines that `start` has started; their ends are reported there, and not by `ended`.

        None: there are none, or they are started like any other role and none can start again.
        """

    def start(self, role: str, arguments: list[str], environment: Environment) -> None:
        """Start `role` on all its nodes, with the variables of `environment[node]`.

        The conductor calls it from its main thread, once for each role, and again after `end`; it does not wait for
        the role.
        """

    def end(self, roles: Collection[str], ranks: RankMap) -> None:
        """End every process of `roles` by force, and forget them: the next start places them by `ranks`.

        The conductor calls it from its main thread, where `fixed` is empty. Blocks for seconds: a node that does not
        answer is not waited for.
        """

    def ended(self) -> list[Ended]:
        """Return the process groups that ended since the last call, in order. The supervisor's thread polls it."""

    def stop(self, done: bool, grace_s: float) -> None:
        """End every process of every role, and wait until they are gone: a little longer than `grace_s`.

        done: the ranks said that they have closed what they hold, and are leaving.
        """


class EngineEnds:
    """Collects how engines ended: their launcher knows of signals, a rank that is left only that another is gone."""

    def __init__(self) -> None:
        self._said: dict[int, tuple[float, str]] = {}

    def said(self, engine: int, why: str) -> None:
        """Note what a rank says ended its engine, whose processes end within the second. For any thread."""
        self._said.setdefault(engine, (time.monotonic(), why))

    def news(self, ended: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
        """Return (engine, why): what the launcher has `ended`, and what a rank said where that has not come in time."""
        found = []
        for engine, how in ended:
            _, why = self._said.pop(engine, (0.0, how))
            found.append((engine, how if KILLED in how else why))
        due = [engine for engine, (at, _) in list(self._said.items()) if time.monotonic() > at + timeouts.ENGINE_END_S]
        return found + [(engine, self._said.pop(engine)[1]) for engine in due]
