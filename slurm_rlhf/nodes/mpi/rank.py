"""Do what a process of COMM_WORLD does: be the agent of its rank, and on rank 0 the parent of the conductor, too.

Rank and conductor are child processes, so that the MPI library stays out of the process that computes, and so that a
process that lives on sees and reports their end. The conductor's side is here, too: the launcher under MPI, whose
agents exist already, one for each rank, and start what the conductor says.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Collection, Mapping
from concurrent.futures import Future, wait
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import IO, Any

from slurm_rlhf.cluster.network import address_among, listening
from slurm_rlhf.cluster.processes import KEYS, STORE_FD
from slurm_rlhf.cluster.stop import handled
from slurm_rlhf.config.schema_jobs import Timeout
from slurm_rlhf.errors import RunError
from slurm_rlhf.nodes.agent import Agent, client_of
from slurm_rlhf.nodes.agent_steps import AgentServer
from slurm_rlhf.nodes.child_process import bound_to_parent, start_child
from slurm_rlhf.nodes.environment import IGNORED, visible_gpus, without_injected
from slurm_rlhf.nodes.facts import WORKER_MODULE, Orders, StepSpec, share_on, worker_arguments
from slurm_rlhf.nodes.launcher import Ended
from slurm_rlhf.nodes.mpi.assignment import Assignment, Communicator
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.polling import wait_until
from slurm_rlhf.run_directory import RunDirectory
from slurm_rlhf.wire import timeouts
from slurm_rlhf.wire.client import ControlClient
from slurm_rlhf.wire.messages import Peer


def follow(world: Communicator, ranks: RankMap, assignment: Assignment, start_s: float) -> None:
    """Be the agent of any rank but 0 until the conductor says that all is over."""
    with handled(IGNORED, signal.SIG_IGN):
        orders = world.broadcast(timeout_s=start_s)
        if orders is not None:
            RankAgent(Orders(**orders), ranks, assignment).serve()


def lead(
    world: Communicator, ranks: RankMap, assignment: Assignment, start_s: float, conductor: list[str], said: str
) -> int:
    """Be the agent of rank 0, and run the command `conductor`; return its exit code.

    The conductor reads `said` from its input, and gets a file descriptor, to which it writes the orders of the agents.
    """
    reading, writing = os.pipe()
    # In a session of its own: a launcher that kills rank 0's process group leaves it the time to say what happened.
    child = subprocess.Popen(
        bound_to_parent([*conductor, str(writing)], signal.SIGTERM),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,  # mpirun gives ranks a terminal, whatever its own output is
        pass_fds=[writing],
        start_new_session=True,
        env=without_injected(os.environ),
    )
    os.close(writing)
    assert child.stdout is not None
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError), child.stdin as start:
        start.write(said.encode())
    copying = threading.Thread(target=_copy, args=(child.stdout,), name="conductor-output", daemon=True)
    copying.start()

    def relay(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(number)

    with handled(IGNORED, relay):  # only the conductor reacts to the signals of a step
        with open(reading, encoding="utf-8") as file:
            orders = file.readline()  # empty: it has ended
        world.broadcast(json.loads(orders) if orders else None, start_s)
        if orders:
            RankAgent(Orders(**json.loads(orders)), ranks, assignment).serve()
        copying.join()
    return code if (code := child.wait()) >= 0 else 128 - code


def _copy(output: IO[bytes]) -> None:
    while data := os.read(output.fileno(), 1 << 16):
        sys.stdout.buffer.write(data)
        sys.stdout.flush()


class RankAgent(Agent):
    """Is the parent of one rank, which has a slot of its own."""

    def __init__(self, orders: Orders, ranks: RankMap, own: Assignment) -> None:
        super().__init__(orders, own.node)
        self._own = own
        self._number = own.number(ranks)
        self._world = ranks.world(own.role)

    def _client(self) -> ControlClient:
        return client_of(self._orders, self._own.role, self._node, rank=self._number, world=self._world)

    def _start(self, spec: StepSpec, ranks: RankMap) -> str:
        if spec.store:
            self._start_rank(spec, ranks, spec.store, None)
            return spec.store
        address = address_among([share.node for share in ranks.roles[spec.role]], self._node)
        with listening(address) as store:
            where = f"{address}:{store.getsockname()[1]}"
            self._start_rank(spec, ranks, where, store)
            return where

    def _start_rank(self, spec: StepSpec, ranks: RankMap, where: str, store: socket.socket | None) -> None:
        """Start the rank. The ranks of its role meet at `where`, host:port; `store`: its socket, in the first rank."""
        share = share_on(ranks, spec.role, self._node)
        host, _, port = where.rpartition(":")
        variables = {
            **spec.environment[self._node],
            # As torchrun tells a worker.
            "RANK": str(self._number),
            "WORLD_SIZE": str(self._world),
            "LOCAL_RANK": str(self._own.local_rank),
            "LOCAL_WORLD_SIZE": str(len(share.ranks)),
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            # The store exists already: no rank may open one at that port.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": spec.run_id,
            **visible_gpus(ranks.topology, self._node, share.gpus, {}),
        }
        threads = min(int(variables.get("OMP_NUM_THREADS", "1")), len(os.sched_getaffinity(0)))
        variables |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))  # its CPUs may be bound
        if store is not None:
            variables[STORE_FD] = str(store.fileno())
        environment = self._environment(spec, ranks, variables)
        arguments = [*spec.arguments, *worker_arguments(ranks, spec.role, share)]
        command = [sys.executable, "-m", WORKER_MODULE, *arguments]
        fds = (store.fileno(),) if store is not None else ()
        log = RunDirectory(Path(spec.run_dir)).role_log(spec.role, f"{self._node}.mpi", self._number)
        with handled(IGNORED, signal.SIG_IGN):  # as the child does, too
            self._processes[spec.role] = start_child(command, log, environment, pass_fds=fds, new_session=False)


class MpiAgents(AgentServer):
    """Knows the agents of the ranks, which exist already and wait for their orders."""

    def __init__(self, run_dir: Path, address: str, timeout: Timeout, orders: int) -> None:
        """`orders`: file descriptor; what is written there reaches all ranks."""
        super().__init__(run_dir, address, timeout)
        self._orders = orders
        self.news: deque[Ended] = deque()

    def begin(self, orders: Orders) -> None:
        with open(self._orders, "w", encoding="utf-8") as file:
            file.write(json.dumps(asdict(orders)) + "\n")

    def _note(self, peer: Peer, event: str, data: dict[str, Any]) -> None:
        if event == "here":
            self.residents.setdefault(peer.host, peer)
        else:
            log = RunDirectory(self.run_dir).role_log(peer.role, f"{peer.host}.mpi", peer.rank)
            self.news.append(Ended(peer.role, peer.host, str(data["how"]), log))

    def _lose(self, peer: Peer) -> None:
        how = "was ended by the MPI launcher, which ends all ranks when one is gone; its own output names it"
        self.news.append(Ended(peer.role, peer.host, how, Path("/dev/null")))


class MpiLauncher:
    """Implement `nodes.launcher.Launcher` in the conductor, a child of rank 0.

    No role can be started again: a rank that is gone is missing in COMM_WORLD.
    """

    fixed = "under MPI no role can be started again: a rank that is gone is missing in MPI_COMM_WORLD"
    unfit: Mapping[str, str] = {}
    engines = None  # none can be started again

    def __init__(self, agents: MpiAgents, ranks: RankMap) -> None:
        self.agents = agents
        self._ranks = ranks
        self.address = agents.address
        self._run_id = secrets.token_hex(6)

    def start(self, role: str, arguments: list[str], environment: Mapping[str, Mapping[str, str]]) -> None:
        first, *others = self.agents.server.wait_for(role, self._ranks.world(role), self.agents.timeout.start)
        directory = RunDirectory(self.agents.run_dir)
        keys = directory.keys.read_text(encoding="utf-8")
        own = {node: {**variables, KEYS: keys} for node, variables in environment.items()}
        spec = StepSpec(role, str(directory.root), self._run_id, arguments, own)

        def start_others(answer: Future[str]) -> None:
            for peer in others if answer.exception() is None else ():
                self.agents.start_there(peer, replace(spec, store=answer.result()), self._ranks)

        self.agents.start_there(first, spec, self._ranks).add_done_callback(start_others)

    def end(self, roles: Collection[str], ranks: RankMap) -> None:
        raise RunError(self.fixed)

    def ended(self) -> list[Ended]:
        return [self.agents.news.popleft() for _ in range(len(self.agents.news))]

    def stop(self, done: bool, grace_s: float) -> None:
        """Let all ranks leave, or end them; their agents leave MPI together."""
        for peer in self._present():
            self.agents.call(peer, "leave")
        if done:
            wait_until(lambda: not self._present(), grace_s, 0.05, 0.05)
        wait([self.agents.call(peer, "kill", [peer.role]) for peer in self._present()], timeouts.MPI_CLOSED_S)
        self.agents.close()

    def _present(self) -> list[Peer]:
        return [peer for role in self._ranks.roles for peer in self.agents.server.peers(role) if not peer.lost]
