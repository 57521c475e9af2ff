"""Define what a launcher does: the seam between the conductor and the processes of the roles.

There are two: `nodes.agent_launcher` (srun steps, or one machine) and `nodes.mpi.launcher` (MPI ranks).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from slurm_rlhf.cluster.slurm_notation import expand
from slurm_rlhf.errors import PlacementError
from slurm_rlhf.nodes.engine_launcher import EngineLauncher
from slurm_rlhf.nodes.node_look import NodeView
from slurm_rlhf.placement.rank_map import RankMap


@dataclass(frozen=True, slots=True)
class Ended:
    """Report that a process group of a role has ended, for whatever reason."""

    role: str
    node: str  # where it ended; a list of nodes if the launcher cannot tell which came first
    how: str  # "ended with status 1", "was killed by SIGKILL"
    log: Path  # file with the launcher's own output


def names_in(nodes: str) -> list[str]:
    """List the nodes that an `Ended` or srun names; where it is no list, that."""
    try:
        return expand(nodes)
    except PlacementError:
        return [nodes]


class Launcher(Protocol):
    """Start the roles of one rank map. Created by the command line, used by the conductor's supervisor."""

    fixed: str
    """Why no role can be started again; empty: roles can."""

    unfit: Mapping[str, str]
    """Node of the allocation -> why it is to take over no ranks, though it has none."""

    @property
    def address(self) -> str:
        """Return the address of this process for the run's nodes; loopback if all are this machine."""

    @property
    def engines(self) -> EngineLauncher | None:
        """Return what keeps the engines that `start` has started: it, and not `ended`, tells of those that end.

        None: there are none, or they are started like any other role and none can start again.
        """

    def start(self, role: str, arguments: list[str], environment: Mapping[str, Mapping[str, str]]) -> None:
        """Start `role` on all its nodes, with the variables of `environment[node]`.

        The conductor calls it from its main thread, once for each role, and again after `end`; it does not wait for
        the role.
        """

    def end(self, roles: Collection[str], ranks: RankMap) -> None:
        """End every process of `roles` by force, and forget them: they are started again, as `ranks` has them.

        The conductor calls it from its main thread, where `fixed` is empty. Blocks for seconds: a node that does not
        answer is not waited for.
        """

    def ended(self) -> list[Ended]:
        """Return the process groups that ended since the last call, in order. The supervisor's thread polls it."""

    def stopped(self) -> list[tuple[str, int]]:
        """Return (role, process id) of the torchruns that a signal has stopped, as far as this process sees them."""

    def look(self, pids: Mapping[str, Sequence[int]], within_s: float) -> list[NodeView]:
        """Return what each node sees of the processes `pids[node]`. A node may be missing.

        The watchdog calls it, from its thread, when a run hangs. Blocks for `within_s` at most; raises OSError and
        RunError.
        """

    def unheard(self, seconds: float) -> set[str]:
        """Return the nodes that were heard once, and of which no agent was heard for `seconds`. Does not block."""

    def stop(self, done: bool, grace_s: float) -> None:
        """End every process of every role, and wait until they are gone: a little longer than `grace_s`.

        done: the ranks said that they have closed what they hold, and are leaving.
        """
