"""Start the roles in a Slurm allocation: one `srun` step per role, an agent on each of its nodes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from slurm_rlhf.cluster.network import address_among
from slurm_rlhf.config.roles import ROLES, ROLLOUT
from slurm_rlhf.nodes.agent_steps import AgentStep, AgentSteps
from slurm_rlhf.nodes.launcher import Ended
from slurm_rlhf.nodes.slurm_engines import SlurmEngines
from slurm_rlhf.nodes.slurm_run import SlurmRun
from slurm_rlhf.nodes.srun import RunningStep, look_step, role_step
from slurm_rlhf.nodes.step_spec import StepSpec
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.polling import wait_until
from slurm_rlhf.wire import timeouts


class SlurmLauncher:
    """Implement `nodes.launcher.Launcher` inside `sbatch` and `salloc`.

    The exit of srun proves nothing: if the only node of a role dies, srun returns 0; if one of several dies, it does
    not return before SlurmdTimeout. A task that srun reports as failed has failed; only the ranks can report success.
    """

    fixed = ""

    def __init__(self, run: SlurmRun, ranks: RankMap) -> None:
        """Raise PlacementError if this process cannot reach the nodes."""
        self.unfit = run.unfit
        self._run = run
        self._ranks = ranks
        self._roles: list[AgentStep] = []
        self._written = False  # the rank map, into the run directory
        self._stopping = False
        self._lock = threading.Lock()
        self.engines: SlurmEngines | None = None
        self.address = address_among(ranks.used_nodes, run.slurm.node_name)
        self._steps = AgentSteps(run, self.address)

    def start(self, role: str, arguments: list[str], environment: Mapping[str, Mapping[str, str]]) -> None:
        if ROLES[role].kind == "engine":
            self.engines = SlurmEngines(self._run, self._ranks, self._steps)
            self.engines.start(arguments, environment)
            return
        if not self._written:
            self._written = True
            if self.engines is not None:
                self.engines.place_others(self._ranks)
            else:
                self._run.write_map(self._ranks)
        step = role_step(self._ranks, role, self._run.logs, self._run.container)
        spec = StepSpec(role, str(self._run.run_dir), self._run.run_id, arguments, environment)
        with self._lock:
            self._roles.append(self._steps.start(step, self._run.logs / f"{role}.srun.log", spec, self._ranks))

    def end(self, roles: Collection[str], ranks: RankMap) -> None:
        with self._lock:
            ended = [item for item in self._roles if item.spec.role in roles]
            self._roles = [item for item in self._roles if item.spec.role not in roles]
            self._ranks, self._written = ranks, False
        if ROLLOUT in roles and self.engines is not None:
            self.engines.stop(False, 0.0)
            self.engines = None
        self._steps.end(ended)

    def ended(self) -> list[Ended]:
        news: list[Ended] = []
        with self._lock:
            for item in self._roles:
                if self._stopping or not self._steps.will_run(item):
                    log = item.running.log
                    news += [Ended(item.spec.role, node, how, log) for node, _, how in item.news()]
        return news

    def stopped(self) -> list[tuple[str, int]]:
        return []  # torchruns are children of the agents

    def look(self, pids: Mapping[str, Sequence[int]], directory: Path, within_s: float) -> None:
        self._steps.look(self._steps.peers, pids, directory, within_s)

    def unreached(self, nodes: Sequence[str]) -> list[str]:
        running = RunningStep(look_step(self._ranks, nodes), ["true"], self._run.logs / "unreached.srun.log")
        running.start()
        wait_until(lambda: running.code is not None, timeouts.NODE_REACHED_S, 0.05, 0.2)
        running.signal(signal.SIGTERM)
        return running.unreached()

    def stop(self, done: bool, grace_s: float) -> None:
        with self._lock:
            self._stopping = True
        engines = self.engines.forget() if self.engines is not None else []
        self._steps.end([*self._roles, *engines], done, grace_s)
        self._steps.close()
