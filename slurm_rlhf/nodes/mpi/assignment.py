"""Recognise a start by an MPI launcher, and place the roles on the processes that it started.

`Communicator` lets the processes of COMM_WORLD find each other and exchange a few small messages: the only user of
mpi4py. Messages are JSON: mpi4py itself would pickle objects. Nothing here spins on the cores that the ranks compute
on, as the blocking calls of MPI do.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from slurm_rlhf.cluster.gpu_query import local_gpus
from slurm_rlhf.cluster.resources import node_name
from slurm_rlhf.cluster.slurm_environment import read_slurm
from slurm_rlhf.config.roles import colocations
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import CallTimeout, ConfigError, PlacementError
from slurm_rlhf.nodes.facts import share_on
from slurm_rlhf.placement.rank_map import RankMap, place
from slurm_rlhf.placement.topology import CPU, GPU, Node, Topology, role_sizes
from slurm_rlhf.polling import wait_until
from slurm_rlhf.wire import timeouts

_COUNTS = (
    ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("mpirun", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("mpiexec", "PMI_SIZE", "PMI_RANK"),
)
_STEP = ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")


@dataclass(frozen=True, slots=True)
class Launched:
    """Hold what a launcher says to one of its processes: rank `rank` of `size`, in the variable `variable`."""

    by: str  # mpirun, mpiexec or srun
    variable: str
    size: int
    rank: int


def launched(environ: Mapping[str, str]) -> Launched | None:
    """Return the MPI launcher that started this process; None if a single process was started.

    A step of several tasks counts as an MPI launcher whatever its --mpi is: N copies of this program mean N ranks.
    """
    tables = _COUNTS if environ.get("SLURM_STEP_NUM_TASKS", "1") == "1" else (_COUNTS[0], _STEP)
    for by, size, rank in tables:
        count = environ.get(size, "")
        if not count.isdecimal():
            continue
        # One task of srun with PMI is an ordinary process; mpirun is never used for that.
        if by == "srun" and (slurm := read_slurm(environ)) is not None and slurm.step_id is None:
            continue
        if int(count) > 1 or by == "mpirun":
            return Launched(by, size, int(count), int(environ.get(rank, "0")))
    return None


def check_world(start: Launched, size: int) -> None:
    """Raise ConfigError if COMM_WORLD is not what the launcher started: often each process is alone in its own."""
    if size == start.size:
        return
    said = f"{start.by} started {start.size} processes ({start.variable}={start.size}), but COMM_WORLD has {size}: "
    if start.by == "srun":
        raise ConfigError(
            f"{said}srun gave them no way to find each other. Start them with srun --mpi=pmix (srun --mpi=list names "
            "what this cluster has), and with an mpi4py built for an MPI that speaks it"
        )
    raise ConfigError(
        f"{said}mpi4py was built for another MPI than this {start.by}'s. Use the {start.by} of that MPI (python -m "
        "mpi4py --mpi-lib-version names it), or build mpi4py for this one: MPICC=mpicc pip install --no-binary=mpi4py "
        "--force-reinstall mpi4py"
    )


@dataclass(frozen=True, slots=True)
class Process:
    """Describe where one rank of COMM_WORLD runs."""

    node: str
    cpus: tuple[int, ...]  # CPUs that it may run on
    gpus: tuple[str, ...]  # GPUs that it sees, as CUDA_VISIBLE_DEVICES names them


def this_process() -> Process:
    return Process(node_name() or socket.gethostname(), tuple(os.sched_getaffinity(0)), local_gpus(os.environ))


class Assignment(NamedTuple):
    """Say which rank a process is: number `local_rank` of the ranks of `role` on `node`."""

    role: str
    node: str
    local_rank: int

    def number(self, ranks: RankMap) -> int:
        """Return its number among all ranks of the role."""
        return share_on(ranks, self.role, self.node).ranks[self.local_rank]


@dataclass(frozen=True, slots=True)
class Placed:
    """Hold the rank map; rank i of COMM_WORLD is `assignments[i]`."""

    ranks: RankMap
    assignments: tuple[Assignment, ...]


def place_processes(config: Config, processes: Sequence[Process], start: Launched) -> Placed:
    """Place the roles on the processes: each process is a slot, and every slot gets a rank.

    Raises ConfigError for what MPI cannot do, PlacementError when the roles do not fit or do not fill the processes.
    """
    slot = "there every process holds a rank and has a slot of its own"
    for asked, key, why in (
        (colocations(config), "train.colocate_...", slot),
        (config.cluster.spares, "cluster.spares", slot),
        (
            config.reward.workers_num_nodes,
            "reward.workers_num_nodes",
            f"{slot}, and workers run on the conductor's node",
        ),
        (config.slurm.container, "slurm.container", f"put it between them: {start.by} ... apptainer exec IMAGE ..."),
    ):
        if asked:
            remedy = "Leave the key out, or start the run by sbatch and without MPI"
            raise ConfigError(f"{key} does not work with {start.by}: {why}. {remedy}")
    sizes = role_sizes(config)
    needed = sum(size.slots for size in sizes)
    if needed != len(processes):
        asked = ", ".join(f"{size.role} {size.slots}" for size in sizes)
        flag = f"srun --ntasks={needed}" if start.by == "srun" else f"{start.by} -np {needed}"
        raise PlacementError(
            f"{start.by} started {len(processes)} processes, but the roles have {needed} ranks ({asked}): start {flag}"
        )
    topology, slots = _topology(processes)
    ranks = place(topology, sizes)
    at = {
        (share.node, slot): Assignment(role, share.node, index)
        for role, shares in ranks.roles.items()
        for share in shares
        for index, slot in enumerate(share.gpus)
    }
    return Placed(ranks, tuple(at[slot] for slot in slots))


def _topology(processes: Sequence[Process]) -> tuple[Topology, list[tuple[str, int]]]:
    """Return the nodes in the order of their first ranks, and the slot of each process on its node."""
    on: dict[str, list[Process]] = {}
    slots = []
    for process in processes:
        there = on.setdefault(process.node, [])
        slots.append((process.node, len(there)))
        there.append(process)
    accelerator = GPU if all(process.gpus for process in processes) else CPU
    nodes = tuple(
        Node(
            name,
            len(there),
            len({cpu for process in there for cpu in process.cpus}),
            _devices(name, there) if accelerator == GPU else (),
        )
        for name, there in on.items()
    )
    return Topology(nodes, accelerator), slots


def _devices(node: str, processes: Sequence[Process]) -> tuple[str, ...]:
    """Return the GPU of each process: the i-th that all see, or the one it was bound to."""
    first, seen = processes[0].gpus, [process.gpus for process in processes]
    if seen.count(first) == len(seen) <= len(first):
        return first[: len(seen)]
    if len({*seen}) == len(seen) and {*map(len, seen)} == {1}:
        return tuple(gpu for (gpu,) in seen)
    raise PlacementError(
        f"node {node} has {len(processes)} processes and {len(first)} GPUs, and every rank needs one of its own: start "
        f"{len(first)} processes on it (mpirun --map-by ppr:{len(first)}:node, srun --ntasks-per-node={len(first)}); "
        "where --gpus-per-task shows each its own GPU alone, add --gpu-bind=none"
    )


_POLL_S = 0.01


class Communicator:
    """Exchange messages with the other processes of COMM_WORLD."""

    def __init__(self, start: Launched) -> None:
        """Join MPI. Raises ConfigError if mpi4py is missing or COMM_WORLD is not what `start` says."""
        try:
            import mpi4py

            mpi4py.rc(threads=False, finalize=False)
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise ConfigError(
                f"{start.by} started this, but mpi4py cannot be used ({error}): install it for the MPI of this "
                f"{start.by} (MPICC=mpicc pip install --no-binary=mpi4py mpi4py), or start the run without MPI"
            ) from None
        self._mpi = MPI
        self._comm: Any = MPI.COMM_WORLD
        self.rank, self.size = int(self._comm.rank), int(self._comm.size)
        check_world(start, self.size)

    def gather(self, value: Any, timeout_s: float = timeouts.MPI_S) -> list[Any]:
        """Return the `value` of every rank, in rank order. Blocks until all have called it, or raises CallTimeout."""
        mine = json.dumps(value).encode()
        sizes = memoryview(bytearray(8 * self.size)).cast("q")
        here = memoryview(bytearray(8)).cast("q")
        here[0] = len(mine)
        self._wait(self._comm.Iallgather(here, sizes), timeout_s)
        counts = sizes.tolist()
        everything = bytearray(sum(counts))
        places = [sum(counts[:rank]) for rank in range(self.size)]
        kind = self._mpi.BYTE
        self._wait(self._comm.Iallgatherv([mine, kind], [everything, counts, places, kind]), timeout_s)
        return [json.loads(everything[at : at + count]) for at, count in zip(places, counts, strict=True)]

    def broadcast(self, value: Any = None, timeout_s: float = timeouts.MPI_S) -> Any:
        """Return the `value` of rank 0 on every rank. Blocks until rank 0 has called it, or raises CallTimeout."""
        return self.gather(value, timeout_s)[0]

    def leave(self) -> None:
        """Wait for all ranks, then leave MPI. A launcher takes a process that ends without it for a crash."""
        self._wait(self._comm.Ibarrier(), timeouts.MPI_LEAVE_S)
        self._mpi.Finalize()

    def _wait(self, request: Any, timeout_s: float) -> None:
        if not wait_until(request.Test, timeout_s, _POLL_S, _POLL_S):
            raise CallTimeout(
                f"MPI: rank {self.rank} of {self.size} waited {timeout_s:g} s for the others: one of "
                "the processes hangs or never started; the launcher's output says more"
            )
