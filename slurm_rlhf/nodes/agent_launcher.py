"""Start the roles by agents: under Slurm one `srun` step per role with an agent on each node, else one agent."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence

from slurm_rlhf.cluster.network import LOOPBACK, address_among
from slurm_rlhf.cluster.processes import process_state
from slurm_rlhf.config.roles import ROLES, ROLLOUT
from slurm_rlhf.nodes.agent_engines import AgentEngines
from slurm_rlhf.nodes.agent_steps import AgentStep, AgentSteps
from slurm_rlhf.nodes.launcher import Ended
from slurm_rlhf.nodes.node_look import NodeView
from slurm_rlhf.nodes.step_spec import StepSpec
from slurm_rlhf.placement.rank_map import RankMap


class AgentLauncher:
    """Implement `nodes.launcher.Launcher` inside `sbatch` and `salloc`, and on one machine.

    The exit of srun proves nothing: if the only node of a role dies, srun returns 0; if one of several dies, it does
    not return before SlurmdTimeout. A task that srun reports as failed has failed; only the ranks can report success.
    """

    fixed = ""

    def __init__(self, steps: AgentSteps, ranks: RankMap, unfit: Mapping[str, str]) -> None:
        """`steps` stay open. Raises PlacementError if this process cannot reach the nodes."""
        self.unfit = unfit
        self._steps = steps
        self._ranks = ranks
        self._roles: list[AgentStep] = []
        self._written = False  # the rank map, into the run directory
        self._stopping = False
        self._lock = threading.Lock()
        self.engines: AgentEngines | None = None
        self.address = address_among(ranks.used_nodes, steps.slurm.node_name) if steps.slurm else LOOPBACK

    def start(self, role: str, arguments: list[str], environment: Mapping[str, Mapping[str, str]]) -> None:
        if ROLES[role].kind == "engine":
            self.engines = AgentEngines(self._steps, self._ranks, self.unfit)
            self.engines.start(arguments, environment)
            return
        if not self._written:
            self._written = True
            if self.engines is not None:
                self.engines.place_others(self._ranks)
            else:
                self._steps.write_map(self._ranks)
        steps = self._steps
        spec = StepSpec(role, str(steps.run_dir), steps.run_id, arguments, environment)
        with self._lock:
            self._roles.append(steps.start(spec, self._ranks))

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
        here = [(item.spec.role, item.torchrun) for item in self._roles if item.torchrun]
        return [(role, pid) for role, pid in here if process_state(pid).startswith("T")]

    def look(self, pids: Mapping[str, Sequence[int]], within_s: float) -> list[NodeView]:
        return self._steps.look(pids, within_s)

    def unheard(self, seconds: float) -> set[str]:
        return self._steps.unheard(seconds)

    def stop(self, done: bool, grace_s: float) -> None:
        with self._lock:
            self._stopping = True
        engines = self.engines.forget() if self.engines is not None else []
        self._steps.end([*self._roles, *engines], done, grace_s)
