"""Start the steps of a run in a Slurm job, tell their agents what to start, and hear how that ended.

`AgentServer` is the conductor's end of the connections to agents, whoever has started them.
"""

from __future__ import annotations

import json
import math
import secrets
import signal
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from slurm_rlhf.cluster.network import LOOPBACK, address_among
from slurm_rlhf.cluster.slurm_environment import SlurmEnvironment
from slurm_rlhf.config.schema_jobs import Timeout
from slurm_rlhf.errors import RoleDied
from slurm_rlhf.nodes.facts import NODES, RANK_MAP, WORKERS, Orders, StepSpec
from slurm_rlhf.nodes.launcher import names_in
from slurm_rlhf.nodes.node_look import NodeView
from slurm_rlhf.nodes.srun import (
    AGENT,
    HOST,
    PASSING_FAILURES,
    Container,
    RunningStep,
    Step,
    end,
    nodes_step,
    role_step,
    step_command,
    wait_over,
    workers_step,
)
from slurm_rlhf.observe.run_log import WORKERS_LOST
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.placement.topology import Topology
from slurm_rlhf.polling import wait_until
from slurm_rlhf.run_directory import write_atomically
from slurm_rlhf.wire import timeouts
from slurm_rlhf.wire.auth import RunKeys
from slurm_rlhf.wire.codec import decode
from slurm_rlhf.wire.handles import ControlServer
from slurm_rlhf.wire.messages import Peer
from slurm_rlhf.workers.distant import DistantNode
from slurm_rlhf.workers.pool import WorkerNodes


class AgentServer(ABC):
    """Starts an agent on each node and listens for it; agents have keys of their own. Any thread may use it."""

    def __init__(self, run_dir: Path, address: str, timeout: Timeout) -> None:
        """Listen on `address` alone. Raises RunError where that is none of this node."""
        self.run_dir = run_dir
        self.timeout = timeout
        self.residents: dict[str, Peer] = {}
        """Node -> its agent, from before a run to its end."""
        self._keys = RunKeys.new()
        self.server = ControlServer(
            self._keys,
            host=address,
            heartbeat_interval=timeout.heartbeat_interval,
            heartbeat_limit=timeout.heartbeat,
            on_event=self._note,
            on_lost=self._lose,
        )
        self.address = address

    @abstractmethod
    def begin(self, orders: Orders) -> None:
        """Start an agent on each node, without waiting for them. Raises RunError if none can be started."""

    @abstractmethod
    def _note(self, peer: Peer, event: str, data: dict[str, Any]) -> None:
        """Take the event of an agent: it is here, or something that it has started has ended."""

    def _lose(self, peer: Peer) -> None:
        """Take note that an agent is gone."""

    def said(self) -> str:
        """Return what agents printed, such as one that cannot reach this process, and the output of srun."""
        return ""

    def over(self) -> bool:
        """Tell whether all agents have ended."""
        return False

    def orders(self, **what: Any) -> Orders:
        """Return what lets an agent connect; `what`: other fields of its orders."""
        reached = self._keys.text(), self.address, self.server.port
        times = self.timeout.heartbeat_interval, self.timeout.heartbeat
        return Orders(*reached, str(self.run_dir.absolute()), *times, **what)

    def call(
        self, peer: Peer, method: str, argument: Any = None, result: Any = None, limit_s: float = timeouts.AGENT_S
    ) -> Future[Any]:
        """Call an agent, which answers with a `result`. Does not block."""
        reader = partial(decode, declared=result, name=f"the answer to {method}")
        return self.server.call(peer.role, peer.rank, method, argument, limit_s, reader)

    def start_there(self, peer: Peer, spec: StepSpec, ranks: RankMap) -> Future[str]:
        """Let an agent start `spec`; the Future has where others find it. Does not block."""
        return self.call(peer, "start", (spec, ranks.to_json()), str)

    def look(self, pids: Mapping[str, Sequence[int]], within_s: float) -> list[NodeView]:
        """Return what each node sees of its processes `pids[node]`. A node may be missing.

        The watchdog calls it, from its thread, when a run hangs. Blocks for `within_s` at most; raises OSError and
        RunError.
        """
        known = [node for node in pids if node in self.residents]
        calls = [self.call(self.residents[node], "look", list(pids[node]), NodeView) for node in known]
        done, _ = wait(calls, within_s)
        return [call.result() for call in done if call.exception() is None]

    def worker_nodes(self, tell: Callable[[str], None]) -> WorkerNodes:
        """Start agents on the nodes that are kept for workers, and return these; `tell` tells the user of lost ones."""
        return ()

    def unheard(self, seconds: float) -> set[str]:
        """Return the nodes that were heard once, and of which no agent was heard for `seconds`. Does not block."""
        silent = self.server.silent(seconds)
        return {
            node
            for node in self.residents
            if not self.over() and all(peer.lost or peer in silent for peer in self.server.peers_on(node))
        }

    def close(self) -> None:
        """Say goodbye: agents that are left end what they have started, and themselves."""
        self.server.close()


_ATTEMPTS = 5
"""Most starts of a step that fails for a passing reason."""


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
    code: int | None = None  # exit status of `running` at the last `retry`; `news` reads no later one
    reported: int = 0  # failures of `running` that `news` has seen
    over: set[str] = field(default_factory=set)  # nodes whose agent has said that all is over

    def news(self) -> list[tuple[str, int | None, str]]:
        """Return (node, engine, how) of what ended since the last call; engine None: all that the step had there.

        Agents report it. The end of an agent itself is reported by srun, which may name several nodes.
        """
        found = [self.said.popleft() for _ in range(len(self.said))]
        self.over |= {node for node, engine, _ in found if engine is None}
        for nodes, how in self.running.failures(self.code)[self.reported :]:
            self.reported += 1
            if not self.over.issuperset(names_in(nodes)):
                found.append((nodes, None, how))
        return found


class AgentSteps(AgentServer):
    """Starts the steps of a run in the job `slurm`, and talks to their agents. Any thread may use it."""

    def __init__(
        self,
        run_dir: Path,
        slurm: SlurmEnvironment | None,
        topology: Topology,
        container: Container = HOST,
        timeout: Timeout | None = None,
        workers: int = 0,
    ) -> None:
        """`topology`: all nodes of the job, of which the last `workers` are kept for workers.

        Raises PlacementError if this process cannot reach them.
        """
        names = [node.name for node in topology.nodes]
        self.nodes, kept = names[: len(names) - workers], names[len(names) - workers :]
        address = address_among(names, slurm.node_name) if slurm else LOOPBACK
        super().__init__(run_dir, address, timeout or Timeout())
        self.slurm = slurm
        self.logs = run_dir / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.run_id = f"{run_dir.name}.{secrets.token_hex(8)}"
        """Name that no other start of the run has."""
        self._container = container
        # The tasks print into the log of srun, too: a node may not see the run directory.
        self._nodes = self._step(nodes_step(topology, container), "nodes")
        self._workers = [self._step(workers_step(topology, kept, self.logs, container), WORKERS)] if kept else []
        self._steps: dict[str, AgentStep] = {}  # steps by the name of their start, without Slurm by role

    def _step(self, step: Step, name: str) -> RunningStep:
        """Return a step whose tasks are agents; `name` is that of its log. It is not started yet."""
        command = self._container.command(AGENT, step.name, gpus=bool(step.gpus))  # `ps` shows whose agents they are
        if self.slurm is None:
            return RunningStep(step, command, self.logs / f"{name}.log")
        return RunningStep(step, step_command(step, command), self.logs / f"{name}.srun.log")

    def begin(self, orders: Orders) -> None:
        self._nodes.variables = orders.to_environment()
        self._nodes.start()

    def said(self) -> str:
        return self._nodes.said()

    def over(self) -> bool:
        return self._nodes.code is not None

    def close(self) -> None:
        super().close()
        wait_over([self._nodes, *self._workers], timeouts.STEP_KILL_S)
        end([self._nodes, *self._workers])

    def worker_nodes(self, tell: Callable[[str], None]) -> WorkerNodes:
        for running in self._workers:
            running.variables = self.orders(step=WORKERS).to_environment()
            running.start()
        return [NodeWithWorkers(self, running, node, tell) for running in self._workers for node in running.step.nodes]

    def write_map(self, ranks: RankMap) -> None:
        """Let every process of the run find who is where."""
        write_atomically(self.run_dir / RANK_MAP, json.dumps(ranks.to_json(), indent=1) + "\n")

    def start(self, spec: StepSpec, ranks: RankMap, name: str = "", only: Sequence[str] | None = None) -> AgentStep:
        """Start a step whose agents start `spec`; it does not wait for them, and ends with the calling thread.

        `name` is that of its log, the role's by default; `only`: the nodes, all of the role's by default.
        """
        step = role_step(ranks, spec.role, self.logs, self._container, only)
        started = AgentStep(self._step(step, name or spec.role), spec, ranks)
        self._start(started)
        return started

    def retry(self, step: AgentStep, stopping: bool = False) -> bool:
        """Start a step again if it ended before it did anything, for a passing reason; return whether it was started.

        Never when `stopping`.
        """
        step.code = step.running.code
        ended = step.code is not None and not (stopping or step.said or step.reported or step.over)
        again = ended and step.attempts < _ATTEMPTS and any(text in step.running.said() for text in PASSING_FAILURES)
        if again:
            self._start(step)
        return again

    def _start(self, step: AgentStep) -> None:
        step.name, step.attempts = f"agent of {step.spec.role} ({secrets.token_hex(4)}) on", step.attempts + 1
        step.here, step.store, step.code = {}, "", None
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
            return  # an earlier start of it, or the step `workers`
        if event == "here":
            step.here[node] = peer
            self._order(step, node)
        elif event == "ended":
            step.said.append((node, data["engine"], str(data["how"])))

    def _order(self, step: AgentStep, node: str) -> None:
        """Let an agent start its processes; the torchruns of further nodes start once that of the first listens."""
        nodes = step.running.step.nodes
        alone = len(nodes) == 1 or not step.running.step.together
        if alone or node == nodes[0] or step.store:
            spec = replace(step.spec, environment={node: step.spec.environment[node]}, store=step.store)
            answer = self.start_there(step.here[node], spec, step.ranks)
            if not alone and node == nodes[0]:
                answer.add_done_callback(partial(self._let_meet, step, step.name))

    def _let_meet(self, step: AgentStep, name: str, answer: Future[str]) -> None:
        if answer.exception() is None and step.name == name:
            step.store = answer.result()
            for node in step.here:
                if node != step.running.step.nodes[0]:
                    self._order(step, node)

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


class NodeWithWorkers(DistantNode):
    """Implement `workers.distant.DistantNode` by the agent of a node in the step `workers`, which is `running`."""

    def __init__(self, steps: AgentSteps, running: RunningStep, node: str, tell: Callable[[str], None]) -> None:
        self.name, self._steps, self._running, self._tell = node, steps, running, tell
        self._role = f"{WORKERS} {node}"
        self._reported = threading.Lock()

    def ask(self, method: str, key: str, arguments: str, limit_s: float) -> Future[str]:
        server = self._steps.server
        wait_until(lambda: server.peers(self._role) or self.absence(), self._steps.timeout.connect, longest_s=1.0)
        if why := self.absence():
            raise RoleDied(why)
        reader = partial(decode, declared=str, name=f"the answer to {method}")
        return server.call(self._role, 0, method, (key, arguments), limit_s, reader)

    def absence(self, silence_s: float = math.inf) -> str:
        hows = [how for nodes, how in self._running.failures(self._running.code) if self.name in names_in(nodes)]
        over = [] if self._running.alive else ["its step is over"]
        if hows or over:
            return f"{[*hows, *over][0]}; see {self._running.log}"
        silent = self._steps.server.silent(silence_s)
        return f"it was not heard from for {silence_s:g} s" if self._role in [peer.role for peer in silent] else ""

    def lose(self, why: str) -> None:
        if self._reported.acquire(blocking=False):
            self._tell(f"{WORKERS_LOST} on {self.name}: {why}")


class LocalAgents(AgentSteps):
    """Has one agent, a child of this process, which starts all roles."""

    def __init__(self, run_dir: Path, topology: Topology, timeout: Timeout | None = None) -> None:
        super().__init__(run_dir, None, topology, timeout=timeout)

    def start(self, spec: StepSpec, ranks: RankMap, name: str = "", only: Sequence[str] | None = None) -> AgentStep:
        """Let the agent start `spec`; an agent that was killed is started again first."""
        if self.over():
            for peer in self.residents.values():
                self.server.give_up(peer.role, peer.rank, "it has ended")
            self.residents.clear()
            self.begin(self.orders())
        wait_until(lambda: bool(self.residents) or self.over(), self.timeout.start, timeouts.POLL_S, timeouts.POLL_S)
        self._steps[spec.role] = started = AgentStep(self._nodes, spec, ranks, here=self.residents)
        for peer in self.residents.values():
            self.start_there(peer, spec, ranks)
        return started

    def start_there(self, peer: Peer, spec: StepSpec, ranks: RankMap) -> Future[str]:
        return super().start_there(peer, replace(spec, caches=False), ranks)

    def _note(self, peer: Peer, event: str, data: dict[str, Any]) -> None:
        if event == "here":
            self.residents[peer.host] = peer
        elif event == "ended":
            self._steps[data["role"]].said.append((peer.host, data["engine"], str(data["how"])))

    def end(self, steps: Sequence[AgentStep], done: bool = False, grace_s: float = 0.0) -> None:
        """End the processes of steps and wait until they are gone; `done`: all are leaving, and get `grace_s`."""
        for peer in self.residents.values():
            if done:
                self.call(peer, "leave")
                wait_over([self._nodes], grace_s)
            wait([self.call(peer, "kill", [step.spec.role for step in steps])], timeouts.STEP_KILL_S)

    def close(self) -> None:
        if not self.residents:  # it is starting, and would not hear the goodbye
            self._nodes.signal(signal.SIGKILL)
        super().close()
