"""Define what a launcher does, and start the roles on one machine.

A launcher is the seam between the conductor and the processes of the roles. The other launchers: `nodes.slurm` (srun
steps) and `nodes.mpi.launcher` (MPI ranks).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from slurm_rlhf.cluster.local_directory import LocalDirectory, take_temporary
from slurm_rlhf.cluster.network import LOOPBACK
from slurm_rlhf.cluster.processes import exit_text, process_state
from slurm_rlhf.config.roles import ROLES, ROLLOUT
from slurm_rlhf.nodes.child_process import start_child
from slurm_rlhf.nodes.engine_launcher import EngineLauncher, LocalEngines
from slurm_rlhf.nodes.environment import visible_gpus, without_gpu_choice
from slurm_rlhf.nodes.node_look import NodeView, look
from slurm_rlhf.nodes.step_spec import StepSpec, torchrun_command
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.polling import wait_until


@dataclass(frozen=True, slots=True)
class Ended:
    """Report that a process group of a role has ended, for whatever reason."""

    role: str
    node: str  # where it ended; a list of nodes if the launcher cannot tell which came first
    how: str  # "ended with status 1", "was killed by SIGKILL"
    log: Path  # file with the launcher's own output


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


@dataclass(slots=True)
class _Started:
    role: str
    process: subprocess.Popen[bytes]
    log: Path
    reported: bool = False


class LocalLauncher:
    """Start torchruns and engines as children of this process; implements `nodes.launcher.Launcher`."""

    fixed = ""
    unfit: Mapping[str, str] = {}
    address = LOOPBACK

    def __init__(self, run_dir: Path, ranks: RankMap) -> None:
        self._run_dir = run_dir
        self._ranks = ranks
        self._node = ranks.topology.nodes[0].name
        self._started: list[_Started] = []
        self._temporary: LocalDirectory | None = None
        self.engines: LocalEngines | None = None

    def start(self, role: str, arguments: list[str], environment: Mapping[str, Mapping[str, str]]) -> None:
        if ROLES[role].kind == "engine":
            self.engines = LocalEngines(self._run_dir, self._ranks)
            self.engines.start(arguments, environment)
            return
        log = self._run_dir / "logs" / f"{role}.{self._node}.torchrun.log"
        spec = StepSpec(role, str(self._run_dir), f"{self._run_dir.name}.{os.getpid()}", arguments, environment)
        command = torchrun_command(spec, self._ranks, self._node, str(self._run_dir / ".control" / "torchrun"))
        # The devices in the rank map are those that CUDA_VISIBLE_DEVICES gave this process; there is no step to ask.
        gpus = visible_gpus(self._ranks.topology, self._node, self._ranks.roles[role][0].gpus, {})
        self._temporary = self._temporary or take_temporary()
        own = {**environment[self._node], **gpus, "TMPDIR": str(self._temporary.path)}
        variables = {**without_gpu_choice(os.environ), **own}
        self._started.append(_Started(role, start_child(command, log, variables), log))

    def ended(self) -> list[Ended]:
        news = []
        for item in self._started:
            code = item.process.poll()
            if code is not None and not item.reported:
                item.reported = True
                news.append(Ended(item.role, self._node, exit_text(code), item.log))
        return news

    def stopped(self) -> list[tuple[str, int]]:
        pids = [(item.role, item.process.pid) for item in self._started]
        return [(role, pid) for role, pid in pids if process_state(pid).startswith("T")]

    def end(self, roles: Collection[str], ranks: RankMap) -> None:
        self._ranks = ranks
        ended = [item for item in self._started if item.role in roles]
        self._started = [item for item in self._started if item.role not in roles]
        _signal(ended, signal.SIGKILL)
        for item in ended:
            item.process.wait()
        if ROLLOUT in roles and self.engines is not None:
            self.engines.stop(False, 0.0)

    def look(self, pids: Mapping[str, Sequence[int]], within_s: float) -> list[NodeView]:
        return [look(self._node, pids[self._node])]

    def unheard(self, seconds: float) -> set[str]:
        return set()  # all is this machine

    def stop(self, done: bool, grace_s: float) -> None:
        if not done:
            _signal(self._started, signal.SIGTERM)
            wait_until(lambda: not any(item.process.poll() is None for item in self._started), grace_s, 0.02, 0.02)
        # If all ranks are done, ending torchrun gently would only cost seconds. Its workers are sessions of their own,
        # but the kernel ends them with their parent.
        _signal(self._started, signal.SIGKILL)
        if self.engines is not None:
            self.engines.stop(done, grace_s)
        for item in self._started:
            item.process.wait()
        if self._temporary is not None:
            self._temporary.remove()


def _signal(started: Sequence[_Started], number: signal.Signals) -> None:
    for item in started:
        if item.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(item.process.pid, number)
