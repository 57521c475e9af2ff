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
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import IO

from slurm_rlhf.launch.child_process import bound_to_parent
from slurm_rlhf.launch.mpi.communicator import Communicator
from slurm_rlhf.launch.mpi.environment import Assignment
from slurm_rlhf.launch.mpi.launcher import Channel
from slurm_rlhf.launch.mpi.worker import MpiWorker, WorkerSpec, rendezvous_socket
from slurm_rlhf.launch.node import IGNORED
from slurm_rlhf.launch.node_environment import without_injected
from slurm_rlhf.placement.rank_map import RankMap

_POLL_S = 0.1
_LATE_S = 60.0
_KEYS = Path(".control") / "keys.json"


def follow(world: Communicator, ranks: RankMap, assignment: Assignment, start_s: float) -> None:
    """Run the worker of any rank but 0 until rank 0 says stop."""
    with _signals(lambda number: None):
        spec = world.broadcast(timeout_s=start_s)
        if spec is None:
            return
        worker = _start_worker(world, ranks, assignment, WorkerSpec(**spec))
        while (stop := world.receive()) is None:
            if (report := worker.report()) is not None:
                world.send(0, report)
            time.sleep(_POLL_S)
        worker.end(stop)
        world.barrier(stop + _LATE_S)


def lead(
    world: Communicator,
    ranks: RankMap,
    assignment: Assignment,
    start_s: float,
    conductor: list[str],
    run_dir: Path,
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

    def relay(number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(number)

    with _signals(relay):
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
        time.sleep(_POLL_S)
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
        time.sleep(_POLL_S)
    for rank in range(1, world.size):
        world.send(rank, stop)
    worker.end(stop)
    world.barrier(stop + _LATE_S)
    while world.receive() is not None:
        pass  # reports that crossed the stop


def _copy(output: IO[bytes]) -> None:
    while data := os.read(output.fileno(), 1 << 16):
        sys.stdout.buffer.write(data)
        sys.stdout.flush()


@contextmanager
def _signals(relay: Callable[[int], None]) -> Iterator[None]:
    """Pass the signals of a step to `relay`: only the conductor reacts to them."""

    def handle(number: int, frame: FrameType | None) -> None:
        relay(number)

    before = {number: signal.signal(number, handle) for number in IGNORED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
