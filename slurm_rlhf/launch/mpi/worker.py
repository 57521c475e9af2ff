"""Start the worker of one rank under MPI, as torchrun would have started it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_rlhf.cluster.network import address_towards
from slurm_rlhf.cluster.processes import KEYS, STORE_FD
from slurm_rlhf.launch.child_process import exit_text, start_child
from slurm_rlhf.launch.mpi.environment import Assignment
from slurm_rlhf.launch.node import IGNORED, interface_to_others
from slurm_rlhf.launch.node_environment import node_environment, take_cache, visible_gpus
from slurm_rlhf.launch.step_spec import WORKER_MODULE, share_on, worker_arguments
from slurm_rlhf.placement.rank_map import RankMap


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
    elsewhere = [share.node for share in ranks.roles[role][1:]]
    address = address_towards(elsewhere[0]) if elsewhere else "127.0.0.1"
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
    }


class MpiWorker:
    """Run the worker of one rank as a child of this process."""

    def __init__(
        self,
        spec: WorkerSpec,
        ranks: RankMap,
        own: Assignment,
        address: Mapping[str, Any],
        store: socket.socket | None,
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
        cache = take_cache(f"{spec.run_id}.{own.node}.{own.role}")
        interface = interface_to_others(ranks, own.node)
        environment = node_environment(os.environ, own.role, run_dir / "logs", cache, variables, interface)
        arguments = [*spec.arguments[own.role], *worker_arguments(ranks, own.role, share)]
        fds = (store.fileno(),) if store is not None else ()
        with _ignored_signals():
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


@contextmanager
def _ignored_signals() -> Iterator[None]:
    """Let children that are started meanwhile ignore the signals of a step: only the conductor reacts to them."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in IGNORED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
