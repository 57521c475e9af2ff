"""Do what a process of COMM_WORLD does: hold the worker of its rank, and on rank 0 the conductor.

Both are child processes, so that the MPI library stays out of the process that computes, and so that a process that
lives on sees and reports their end.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from slurm_rlhf.cluster.local_directory import take_temporary
from slurm_rlhf.cluster.network import address_among
from slurm_rlhf.cluster.processes import KEYS, STORE_FD, STORE_RANKS, exit_text
from slurm_rlhf.nodes.child_process import bound_to_parent, start_child
from slurm_rlhf.nodes.environment import (
    IGNORED,
    interface_to_others,
    node_environment,
    visible_gpus,
    without_injected,
)
from slurm_rlhf.nodes.mpi.assignment import Assignment
from slurm_rlhf.nodes.mpi.communicator import Communicator
from slurm_rlhf.nodes.mpi.launcher import Channel
from slurm_rlhf.nodes.step_spec import WORKER_MODULE, share_on, worker_arguments
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.placement.topology import GPU
from slurm_rlhf.wire import timeouts

_KEYS = Path(".control") / "keys.json"


def follow(world: Communicator, ranks: RankMap, assignment: Assignment, start_s: float) -> None:
    """Run the worker of any rank but 0 until rank 0 says stop."""
    with _step_signals(signal.SIG_IGN):
        spec = world.broadcast(timeout_s=start_s)
        if spec is None:
            return
        worker = _start_worker(world, ranks, assignment, WorkerSpec(**spec))
        while (stop := world.receive()) is None:
            if (report := worker.report()) is not None:
                world.send(0, report)
            time.sleep(timeouts.POLL_S)
        worker.end(stop)
        world.barrier(stop + timeouts.MPI_S)


def lead(
    world: Communicator, ranks: RankMap, assignment: Assignment, start_s: float, conductor: list[str], run_dir: Path
) -> int:
    """Run the worker of rank 0 and the command `conductor`, which gets a socket's number; return its exit code."""
    ours, theirs = socket.socketpair()
    # In a session of its own: a launcher that kills rank 0's process group leaves it the time to say what happened.
    child = subprocess.Popen(
        bound_to_parent([*conductor, str(theirs.fileno())], signal.SIGTERM),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,  # mpirun gives ranks a terminal, whatever its own output is
        pass_fds=[theirs.fileno()],
        start_new_session=True,
        env=without_injected(os.environ),
    )
    theirs.close()
    assert child.stdout is not None
    copying = threading.Thread(target=_copy, args=(child.stdout,), name="conductor-output", daemon=True)
    copying.start()
    channel = Channel(ours)

    def relay(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(number)

    with _step_signals(relay):
        spec = _collect_spec(channel, child, ranks, run_dir)
        world.broadcast(None if spec is None else asdict(spec), start_s)
        if spec is not None:
            _serve(world, _start_worker(world, ranks, assignment, spec), channel, child)
        channel.close()  # the conductor waits for this: every worker is gone
        copying.join()
    return code if (code := child.wait()) >= 0 else 128 - code


def _collect_spec(channel: Channel, child: subprocess.Popen[bytes], ranks: RankMap, run_dir: Path) -> WorkerSpec | None:
    """Collect the conductor's message about each role; None if it ends instead."""
    arguments: dict[str, list[str]] = {}
    environment: dict[str, Mapping[str, Mapping[str, str]]] = {}
    while len(arguments) < len(ranks.roles):
        for message in channel.receive():
            if "start" in message:
                arguments[message["start"]] = message["arguments"]
                environment[message["start"]] = message["environment"]
        if child.poll() is not None:
            return None
        time.sleep(timeouts.POLL_S)
    keys = (run_dir / _KEYS).read_text(encoding="utf-8")
    return WorkerSpec(secrets.token_hex(6), str(run_dir), keys, arguments, environment)


def _start_worker(world: Communicator, ranks: RankMap, assignment: Assignment, spec: WorkerSpec) -> MpiWorker:
    """Start the worker of this process, after all ranks have heard where the ranks of their role meet."""
    store, own = rendezvous_socket(ranks, assignment.role) if assignment.number(ranks) == 0 else (None, None)
    addresses = dict(found for found in world.gather(own and (assignment.role, own)) if found)
    worker = MpiWorker(spec, ranks, assignment, addresses[assignment.role], store)
    if store is not None:
        store.close()
    return worker


def _serve(world: Communicator, worker: MpiWorker, channel: Channel, child: subprocess.Popen[bytes]) -> None:
    """Pass on reports to the conductor until it says stop or ends; then end all workers."""
    stop: float | None = None
    while stop is None:
        stop = next((message["stop"] for message in channel.receive() if "stop" in message), None)
        if stop is None and child.poll() is not None:
            stop = 0.0
        if (report := worker.report()) is not None:
            channel.send(ended=report)
        while (other := world.receive()) is not None:
            channel.send(ended=other)
        time.sleep(timeouts.POLL_S)
    for rank in range(1, world.size):
        world.send(rank, stop)
    worker.end(stop)
    world.barrier(stop + timeouts.MPI_S)
    while world.receive() is not None:
        pass  # reports that crossed the stop


def _copy(output: IO[bytes]) -> None:
    while data := os.read(output.fileno(), 1 << 16):
        sys.stdout.buffer.write(data)
        sys.stdout.flush()


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Hold what rank 0 broadcasts: the run's keys and, by role, the arguments of workers and node -> variables."""

    run_id: str
    run_dir: str
    keys: str
    arguments: Mapping[str, list[str]]
    environment: Mapping[str, Mapping[str, Mapping[str, str]]]


def rendezvous_socket(ranks: RankMap, role: str) -> tuple[socket.socket, dict[str, Any]]:
    """Open a socket for the store where the ranks of `role` meet; return it and its address."""
    nodes = [share.node for share in ranks.roles[role]]
    address = address_among(nodes, nodes[0])
    listening = socket.create_server((address, 0), backlog=1024)
    return listening, {"host": address, "port": listening.getsockname()[1]}


def torch_variables(ranks: RankMap, own: Assignment, store: Mapping[str, Any]) -> dict[str, str]:
    """Return what torchrun tells a worker; `store` is where the ranks of its role meet."""
    return {
        "RANK": str(own.number(ranks)),
        "WORLD_SIZE": str(ranks.world(own.role)),
        "LOCAL_RANK": str(own.local_rank),
        "LOCAL_WORLD_SIZE": str(len(share_on(ranks, own.role, own.node).ranks)),
        "MASTER_ADDR": store["host"],
        "MASTER_PORT": str(store["port"]),
        # The store exists already: no rank may open one at that port.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        # With GPUs it listens on: NCCL makes connections when it likes.
        **({} if ranks.topology.accelerator == GPU else {STORE_RANKS: str(ranks.world(own.role))}),
    }


class MpiWorker:
    """Run the worker of one rank as a child of this process."""

    def __init__(
        self, spec: WorkerSpec, ranks: RankMap, own: Assignment, address: Mapping[str, Any], store: socket.socket | None
    ) -> None:
        """Start it. `address` is that of the role's store; `store` its socket, in the first rank of the role."""
        share = share_on(ranks, own.role, own.node)
        run_dir = Path(spec.run_dir)
        self._own = own
        self._reported = False
        self._log = run_dir / "logs" / f"{own.role}.{own.node}.mpi.{own.number(ranks)}.log"
        variables = {
            **spec.environment[own.role][own.node],
            **torch_variables(ranks, own, address),
            "TORCHELASTIC_RUN_ID": spec.run_id,
            KEYS: spec.keys,
            **visible_gpus(ranks.topology, own.node, share.gpus, {}),
        }
        threads = min(int(variables.get("OMP_NUM_THREADS", "1")), len(os.sched_getaffinity(0)))
        variables |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))  # a launcher may have bound us
        if store is not None:
            variables[STORE_FD] = str(store.fileno())
        self._temporary = take_temporary()
        interface = interface_to_others(ranks, own.node)
        logs, place = run_dir / "logs", self._temporary.path
        environment = node_environment(os.environ, own.role, logs, place, variables, interface)
        arguments = [*spec.arguments[own.role], *worker_arguments(ranks, own.role, share)]
        fds = (store.fileno(),) if store is not None else ()
        with _step_signals(signal.SIG_IGN):
            command = [sys.executable, "-m", WORKER_MODULE, *arguments]
            self._process = start_child(command, self._log, environment, pass_fds=fds, new_session=False)

    def report(self) -> tuple[str, str, str, str] | None:
        """Return (role, node, how it ended, log) once, after the worker has ended; else None."""
        code = self._process.poll()
        if code is None or self._reported:
            return None
        self._reported = True
        return self._own.role, self._own.node, exit_text(code), str(self._log)

    def end(self, grace_s: float) -> None:
        """Wait for it to leave, and end it by force after `grace_s`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        self._process.kill()
        self._process.wait()
        self._temporary.remove()


@contextmanager
def _step_signals(handle: Callable[[int, FrameType | None], None] | signal.Handlers) -> Iterator[None]:
    """Handle the signals of a step with `handle`, or ignore them with SIG_IGN, as children started meanwhile do too.

    Only the conductor reacts to them.
    """
    before = {number: signal.signal(number, handle) for number in IGNORED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
