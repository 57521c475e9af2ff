"""Start the steps of a run in a Slurm job, tell their agents what to start, and hear how that ended."""

from __future__ import annotations

import json
import secrets
import signal
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from slurm_rlhf.cluster.network import address_among
from slurm_rlhf.cluster.slurm_environment import SlurmEnvironment
from slurm_rlhf.cluster.slurm_notation import expand
from slurm_rlhf.config.schema_jobs import Timeout
from slurm_rlhf.errors import PlacementError
from slurm_rlhf.nodes.agent_server import AgentServer
from slurm_rlhf.nodes.facts import NODES, Orders
from slurm_rlhf.nodes.srun import AGENT, HOST, Container, RunningStep, Step, end, nodes_step, role_step, wait_over
from slurm_rlhf.nodes.step_spec import RANK_MAP, StepSpec
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.placement.topology import Topology
from slurm_rlhf.run_directory import write_atomically
from slurm_rlhf.wire import timeouts
from slurm_rlhf.wire.messages import Peer

_ATTEMPTS = 5
"""Starts of a step that failed for a reason which may be gone the next time."""


@dataclass(slots=True)
class AgentStep:
    """Is a step with an agent on each node, which starts there what `spec` describes.

    The I/O thread of `AgentSteps` and one other thread use it.
    """

    running: RunningStep
    spec: StepSpec
    ranks: RankMap
    name: str = ""  # name of this start of the step
    store: str = ""  # where the torchruns meet
    here: dict[str, Peer] = field(default_factory=dict)  # agents by node
    said: deque[tuple[str, int | None, str]] = field(default_factory=deque)
    attempts: int = 0
    ending: bool = False
    _reported: int = 0
    _ended: set[str] = field(default_factory=set)  # nodes whose agent has said that all is over

    def news(self) -> list[tuple[str, int | None, str]]:
        """Return (node, engine, how) of what ended since the last call; None: all that the step had there.

        Agents tell it. Where an agent itself ended, srun does, and may name several nodes.
        """
        found = []
        while self.said:
            found.append(self.said.popleft())
        self._ended |= {node for node, engine, _ in found if engine is None}
        for nodes, how in self.running.failures()[self._reported :]:
            self._reported += 1
            if not self._ended.issuperset(names_in(nodes)):
                found.append((nodes, None, how))
        return found

    @property
    def quiet(self) -> bool:
        """Tell whether nothing is known of any end."""
        return not self.said and not self._reported and not self._ended


def names_in(nodes: str) -> list[str]:
    """List the nodes that srun named; where it wrote something else, that."""
    try:
        return expand(nodes)
    except PlacementError:
        return [nodes]


class AgentSteps(AgentServer):
    """Starts the steps of a run in the job `slurm`, and talks to their agents. Any thread may use it."""

    def __init__(
        self,
        run_dir: Path,
        slurm: SlurmEnvironment,
        topology: Topology,
        container: Container = HOST,
        timeout: Timeout | None = None,
    ) -> None:
        """`topology`: all nodes of the job. Raises PlacementError if this process cannot reach them."""
        super().__init__(run_dir, address_among(slurm.job_nodes, slurm.node_name), timeout or Timeout())
        self.slurm = slurm
        self.logs = run_dir / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.run_id = f"{slurm.job_id}.{slurm.restart_count}.{secrets.token_hex(4)}"
        """Name that no other start of the run has."""
        self._container = container
        # The tasks print into it, too: a node may not see the run directory.
        self._nodes = self._step(nodes_step(topology, container), self.logs / "nodes.srun.log")
        self._steps: dict[str, AgentStep] = {}  # steps by the name of their start

    def _step(self, step: Step, log: Path) -> RunningStep:
        """Return a step whose tasks are agents; `log` is that of srun itself. It is not started yet."""
        command = self._container.command(AGENT, step.name, gpus=bool(step.gpus))  # `ps` shows whose agents they are
        return RunningStep(step, command, log)

    def begin(self, orders: Orders) -> None:
        self._nodes.variables = orders.to_environment()
        self._nodes.start()

    def said(self) -> str:
        return self._nodes.said()

    def over(self) -> bool:
        return self._nodes.code is not None

    def close(self) -> None:
        super().close()
        wait_over([self._nodes], timeouts.STEP_KILL_S)
        end([self._nodes])

    def write_map(self, ranks: RankMap) -> None:
        """Let every process of the run find who is where."""
        write_atomically(self.run_dir / RANK_MAP, json.dumps(ranks.to_json(), indent=1) + "\n")

    def role_step(self, ranks: RankMap, role: str, only: Sequence[str] | None = None) -> Step:
        """Return the step of a role, as `srun.role_step`."""
        return role_step(ranks, role, self.logs, self._container, only)

    def start(self, step: Step, log: Path, spec: StepSpec, ranks: RankMap) -> AgentStep:
        """Start a step whose agents start `spec`; it does not wait for them, and ends with the calling thread."""
        started = AgentStep(self._step(step, log), spec, ranks)
        self._start(started)
        return started

    def start_more(self, step: AgentStep, node: str, spec: StepSpec, ranks: RankMap) -> bool:
        """Let the agent of `node` start `spec`, too; False: it cannot be reached, or its step is over."""
        peer = step.here.get(node)
        if peer is None or peer.lost or step.running.code is not None:
            return False
        self.call(peer, "start", (spec, ranks.to_json()), str)
        return True

    def will_run(self, step: AgentStep) -> bool:
        """Start a step once more that failed before it did anything, for a reason which may be gone the next time.

        Its failed start may still be ending. Returns whether it will run.
        """
        running = step.running
        failed = running.code is not None or (running.step.together and running.failures())
        if not failed or not step.quiet or step.attempts == _ATTEMPTS or not running.worth_another_try():
            return False
        if running.code is not None:
            self._start(step)
        elif not step.ending:
            step.ending = True
            running.signal(signal.SIGTERM)
        return True

    def _start(self, step: AgentStep) -> None:
        step.name, step.attempts = f"agent of {step.spec.role} ({secrets.token_hex(4)}) on", step.attempts + 1
        step.here, step.store, step.ending = {}, "", False
        self._steps[step.name] = step
        step.running.variables = self.orders(step=step.name).to_environment()
        step.running.start()

    def _note(self, peer: Peer, event: str, data: dict[str, Any]) -> None:
        name, _, node = peer.role.rpartition(" ")
        if name == NODES:
            self.residents[node] = peer
            return
        step = self._steps.get(name)
        if step is None or step.name != name:
            return  # an earlier start of it
        if event == "here":
            step.here[node] = peer
            self._order(step, node)
        elif event == "ended":
            step.said.append((node, data["engine"], str(data["how"])))

    def _order(self, step: AgentStep, node: str) -> None:
        """Let an agent start what it is there for; the torchruns of a role when that of the first node listens."""
        nodes = step.running.step.nodes
        alone = len(nodes) == 1 or not step.running.step.together
        if alone or node == nodes[0] or step.store:
            spec = replace(step.spec, environment={node: step.spec.environment[node]}, store=step.store)
            answer = self.call(step.here[node], "start", (spec, step.ranks.to_json()), str)
            if not alone and node == nodes[0]:
                answer.add_done_callback(partial(self._let_meet, step, step.name))

    def _let_meet(self, step: AgentStep, name: str, answer: Future[str]) -> None:
        if answer.exception() is None and step.name == name:
            step.store = answer.result()
            for node in step.here:
                if node != step.running.step.nodes[0]:
                    self._order(step, node)

    def end_engine(self, step: AgentStep, node: str, engine: int) -> None:
        """Let the agent of `node` end an engine by force."""
        if (peer := step.here.get(node)) is not None:
            self.call(peer, "end", engine)

    def end(self, steps: Sequence[AgentStep], done: bool = False, grace_s: float = 0.0) -> None:
        """End steps and wait until they are gone; `done`: what they have started is leaving, and gets `grace_s`."""
        agents = [peer for step in steps for peer in list(step.here.values())]
        if done:
            for peer in agents:
                self.call(peer, "leave")
            wait_over([step.running for step in steps], grace_s)
        end([step.running for step in steps])
        for peer in agents:
            self.server.dismiss(peer.role, "its step was ended")
