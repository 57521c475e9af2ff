"""The process of one rank under MPI: what torchrun would have made of it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_rlhf.cluster.network import address_towards
from slurm_rlhf.cluster.parent_process import KEYS, STORE_FD
from slurm_rlhf.launch.child_process import bound_to_parent
from slurm_rlhf.launch.node import IGNORED, interface_to_others
from slurm_rlhf.launch.node_environment import node_environment, take_cache, visible_gpus
from slurm_rlhf.launch.step_spec import WORKER_MODULE, share_on
from slurm_rlhf.placement.rank_map import RankMap


@dataclass(frozen=True, slots=True)
class Order:
    """What rank 0 broadcasts: for every role its worker's arguments, and node -> its variables; the run's keys."""

    run_id: str
    run_dir: str
    keys: str
    arguments: Mapping[str, list[str]]
    environment: Mapping[str, Mapping[str, Mapping[str, str]]]


def meeting_socket(ranks: RankMap, role: str) -> tuple[socket.socket, dict[str, Any]]:
    """A socket for the store where the ranks of `role` meet, and what tells the others of it; on its first node."""
    elsewhere = [share.node for share in ranks.roles[role][1:]]
    address = address_towards(elsewhere[0]) if elsewhere else "127.0.0.1"
    listening = socket.create_server((address, 0), backlog=1024)
    return listening, {"host": address, "port": listening.getsockname()[1]}


def torch_variables(ranks: RankMap, role: str, node: str, index: int, meeting: Mapping[str, Any]) -> dict[str, str]:
    """What torchrun tells a worker that is number `index` of `role` on `node`."""
    share = share_on(ranks, role, node)
    return {
        "RANK": str(share.ranks[index]),
        "WORLD_SIZE": str(ranks.world(role)),
        "LOCAL_RANK": str(index),
        "LOCAL_WORLD_SIZE": str(len(share.ranks)),
        "MASTER_ADDR": meeting["host"],
        "MASTER_PORT": str(meeting["port"]),
        # The store is there already: no rank is to open one at that port.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


class MpiWorker:
    """The worker of one rank, a child of this process."""

    def __init__(
        self,
        order: Order,
        ranks: RankMap,
        seat: tuple[str, str, int],
        meeting: Mapping[str, Any],
        store: socket.socket | None,
    ) -> None:
        """Starts it; `store` is the socket of the role's store, in its first rank."""
        self.role, self.node, index = seat
        share = share_on(ranks, self.role, self.node)
        run_dir = Path(order.run_dir)
        self.log = run_dir / "logs" / f"{self.role}.{self.node}.mpi.{share.ranks[index]}.log"
        own = {
            **order.environment[self.role][self.node],
            **torch_variables(ranks, self.role, self.node, index, meeting),
            "TORCHELASTIC_RUN_ID": order.run_id,
            KEYS: order.keys,
        }
        threads = min(int(own.get("OMP_NUM_THREADS", "1")), len(os.sched_getaffinity(0)))
        own |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))  # a launcher may have bound us
        if store is not None:
            own[STORE_FD] = str(store.fileno())
        numbers = [f"--first_rank={share.ranks[0]}", f"--world={ranks.world(self.role)}"]
        command = [sys.executable, "-m", WORKER_MODULE, *order.arguments[self.role], *numbers]
        gpus = visible_gpus(ranks.topology, self.node, share.gpus, {})
        cache = take_cache(f"{order.run_id}.{self.node}.{self.role}")
        interface = interface_to_others(ranks, self.node)
        environment = node_environment(os.environ, self.role, run_dir / "logs", cache, {**own, **gpus}, interface)
        with open(self.log, "ab") as out, _ignored():
            self._process = subprocess.Popen(
                bound_to_parent(command),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=[store.fileno()] if store is not None else [],
            )

    def code(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._process.poll()

    def end(self, grace_s: float) -> None:
        """Wait for it to leave, and end it by force after `grace_s`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        self._process.kill()
        self._process.wait()


class _ignored:
    """Within it, children are started that ignore the signals of a step: the conductor decides what those mean."""

    def __enter__(self) -> None:
        self._before = {number: signal.signal(number, signal.SIG_IGN) for number in IGNORED}

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
