"""Start the roles by agents: under Slurm one `srun` step per role with an agent on each node, else one agent.

The agents of engines start them again, too. An engine that moves to a node without such an agent has a step of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import replace

from slurm_rlhf.cluster.network import LOOPBACK, address_among
from slurm_rlhf.config.roles import ROLES, ROLLOUT
from slurm_rlhf.nodes.agent_steps import AgentStep, AgentSteps
from slurm_rlhf.nodes.facts import StepSpec
from slurm_rlhf.nodes.launcher import Ended, Environment, names_in
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.placement.replacement import with_engine_on


class AgentLauncher:
    """Implement `nodes.launcher.Launcher` inside `sbatch` and `salloc`, and on one machine.

    The exit of srun proves nothing: if the only node of a role dies, srun returns 0; if one of several dies, it does
    not return before SlurmdTimeout. A task that srun reports as failed has failed; only the ranks can report success.
    """

    fixed = ""

    def __init__(self, steps: AgentSteps, ranks: RankMap, unfit: Mapping[str, str]) -> None:
        """`steps` stay open. Raises PlacementError if this process cannot reach the nodes."""
        self.unfit = unfit
        self.agents = steps
        self._ranks = ranks
        self._roles: list[AgentStep] = []
        self._stopping = False
        self._lock = threading.Lock()
        self.engines: AgentEngines | None = None
        self.address = address_among(ranks.used_nodes, steps.slurm.node_name) if steps.slurm else LOOPBACK

    def start(self, role: str, arguments: list[str], environment: Environment) -> None:
        steps = self.agents
        spec = StepSpec(role, str(steps.run_dir), steps.run_id, arguments, environment)
        if ROLES[role].kind == "engine":
            self.engines = AgentEngines(steps, self._ranks, self.unfit, spec)
            self.engines.start()
            return
        if self.engines is not None:
            self.engines.place_others(self._ranks)
        else:
            steps.write_map(self._ranks)
        with self._lock:
            self._roles.append(steps.start(spec, self._ranks))

    def end(self, roles: Collection[str], ranks: RankMap) -> None:
        with self._lock:
            ended = [item for item in self._roles if item.spec.role in roles]
            self._roles = [item for item in self._roles if item.spec.role not in roles]
            self._ranks = ranks
        if ROLLOUT in roles and self.engines is not None:
            self.agents.end(self.engines.forget())
            self.engines = None
        self.agents.end(ended)

    def ended(self) -> list[Ended]:
        news: list[Ended] = []
        with self._lock:
            for item in self._roles:
                if not self.agents.retry(item, self._stopping):
                    log = item.running.log
                    news += [Ended(item.spec.role, node, how, log) for node, _, how in item.news()]
        return news

    def stop(self, done: bool, grace_s: float) -> None:
        with self._lock:
            self._stopping = True
        engines = self.engines.forget() if self.engines is not None else []
        self.agents.end([*self._roles, *engines], done, grace_s)


class AgentEngines:
    """Start the engines of one rank map, each for itself. Used by the thread that leads the job.

    An engine ends when one of its ranks does: the others are ended with it, and no other engine is. A node that is lost
    costs its own engines.
    """

    def __init__(self, agents: AgentSteps, ranks: RankMap, unfit: Mapping[str, str], spec: StepSpec) -> None:
        self.unfit = unfit
        """Node -> why no engine is to start there, though it is one of `spares`."""
        self._ranks = ranks
        self._agents = agents
        self._spec = spec
        self._steps: list[AgentStep] = []
        self._at: dict[int, tuple[AgentStep, str]] = {}  # engine -> where it was started last
        self._gone: set[int] = set()
        self._sent: set[int] = set()  # engines that `end` was called for: their end is no news
        self._news: dict[int, str] = {}  # engine -> how it ended, where `ended` has not returned it yet
        self._lock = threading.Lock()
        self._stopping = False

    @property
    def spares(self) -> list[str]:
        """List the nodes without ranks, on which an engine can start that has lost its own."""
        used = set(self._ranks.used_nodes)
        return [node for node in self._agents.nodes if node not in used]

    def start(self) -> None:
        """Start all engines; it does not wait for them. Called once."""
        self._agents.write_map(self._ranks)
        with self._lock:  # another thread may look for ends already
            self._start(ROLLOUT, self._ranks.engine_nodes, None)

    def _start(self, name: str, node_of: dict[int, str], only: list[int] | None) -> None:
        nodes = None if only is None else list(node_of.values())
        started = self._agents.start(replace(self._spec, engines=only), self._ranks, name, nodes)
        self._steps.append(started)
        self._at |= {engine: (started, node) for engine, node in node_of.items()}

    def place_others(self, ranks: RankMap) -> None:
        """Note where the other roles are from now on, for the run directory and for `spares`."""
        with self._lock:
            own = {share.node: self._ranks.topology.node(share.node) for share in self._ranks.roles[ROLLOUT]}
            known = {node.name for node in ranks.topology.nodes}
            nodes = (*ranks.topology.nodes, *(node for name, node in own.items() if name not in known))
            self._ranks = RankMap(
                replace(ranks.topology, nodes=nodes), {**ranks.roles, ROLLOUT: self._ranks.roles[ROLLOUT]}
            )
            self._agents.write_map(self._ranks)

    def ended(self) -> list[tuple[int, str]]:
        """Return (engine, how) of the engines that ended by themselves since the last call. Does not block."""
        with self._lock:
            self._look()
            news, self._news = self._news, {}
            return sorted(news.items())

    def _look(self) -> None:
        for step in self._steps if not self._stopping else ():
            if self._agents.retry(step):
                continue
            here = {engine: node for engine, (at, node) in self._at.items() if at is step}
            for nodes, engine, how in step.news():
                if engine is not None:
                    self._note(engine, how, here)
                else:
                    for each in (each for each, node in here.items() if node in names_in(nodes)):
                        self._note(each, f"its step on {nodes} {how}; see {step.running.log}", here)
            if step.code is not None:  # srun may say nothing of a node that died
                for engine, node in here.items():
                    self._note(engine, f"the step on {node} is over; see {step.running.log}", here)

    def _note(self, engine: int, how: str, here: Mapping[int, str]) -> None:
        """Note that an engine has ended, if it is one of those that a step has started `here`."""
        if engine in here and engine not in self._gone:
            self._gone.add(engine)
            if engine not in self._sent:
                self._news[engine] = how

    def end(self, engine: int) -> None:
        """End what is left of an engine, by force; returns at once."""
        with self._lock:
            self._news.pop(engine, None)
            if engine not in self._gone:
                self._sent.add(engine)
                step, node = self._at[engine]
                if (peer := step.here.get(node)) is not None:
                    self._agents.call(peer, "end", engine)

    def gone(self, engine: int) -> bool:
        """Tell whether no process of an engine is left, as far as its node says."""
        with self._lock:
            self._look()
            return engine in self._gone

    def start_again(self, engine: int, node: str) -> None:
        """Start an engine that is gone, on its own node or one of `spares`; it does not wait for it.

        Its processes end with the thread that calls this.
        """
        with self._lock:
            if self._stopping:
                return
            step, home = self._at[engine]
            if node != home:
                self._ranks = with_engine_on(self._ranks, ROLLOUT, engine, node)
                own = self._spec.environment
                self._spec = replace(self._spec, environment={**own, node: own.get(node, own[home])})
                self._agents.write_map(self._ranks)
            self._gone.discard(engine)
            self._sent.discard(engine)
            peer = step.here.get(home)
            if node != home or peer is None or peer.lost or step.running.code is not None:
                self._start(f"{ROLLOUT}.engine{engine}", {engine: node}, [engine])
            else:
                self._agents.start_there(peer, replace(self._spec, engines=[engine]), self._ranks)

    def forget(self) -> list[AgentStep]:
        """Stop reporting ends, because the whole job ends; return its steps."""
        with self._lock:
            self._stopping = True
            return self._steps
