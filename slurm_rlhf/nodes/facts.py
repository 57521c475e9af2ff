"""Records that travel as JSON: what the conductor has agents start, what it asks of a node and what it gets."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from slurm_rlhf.cluster.network import LOOPBACK
from slurm_rlhf.errors import PlacementError
from slurm_rlhf.placement.rank_map import NodeShare, RankMap
from slurm_rlhf.wire import timeouts

VARIABLE = "SLURM_RLHF_AGENT"
"""The environment variable of an agent; it holds keys, so it is no argument, which other users could read."""


NODES, WORKERS = "nodes", "workers"
"""Names of the two steps whose agents stay to the end of a run: one on all nodes, from before it; one for workers."""


@dataclass(frozen=True, slots=True)
class Orders:
    """Tell an agent who it is. The conductor listens at `address` and `port`, and accepts `keys`.

    `step` names the start of a role's step, whose agents start processes. Without it an agent stays from before the run
    to its end, and the other fields say what it is to look at.
    """

    keys: str
    address: str
    port: int
    run_dir: str
    beat_s: float
    silent_s: float
    step: str = ""
    canary: str = ""
    places: tuple[tuple[str, str], ...] = ()  # (key, path) that must be readable
    sandbox: str = ""  # reward.sandbox, to be tried; empty: nothing runs in one
    gpus: bool = False  # look at them
    groups: bool = False  # get ready to start processes for the collectives
    limit_s: float = 60.0  # seconds that the examination may take

    def to_environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Orders:
        """Read what `to_environment` made. Raises KeyError without the variable."""
        from msgspec import convert

        return convert(json.loads(environ[VARIABLE]), cls)


@dataclass(frozen=True, slots=True)
class Introduction:
    """Say where other nodes reach an agent, and what its clock shows."""

    address: str
    port: int  # port at which it listens, until a store does
    clock: float  # seconds since the epoch


UNKNOWN = -1
"""A number that the node could not find out."""


@dataclass(frozen=True, slots=True)
class Place:
    """Describe a path that the run reads; `problem` is empty if it can be read."""

    key: str
    path: str
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Reach:
    """Describe how a node sees another one by its name."""

    node: str
    address: str  # the name's address; empty: it has none
    problem: str  # why a connection failed; empty: it was answered


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Hold what a node says of itself. Sizes are bytes."""

    node: str
    clock: float  # seconds since the epoch
    versions: Mapping[str, str]
    equipment: Mapping[str, Any]  # as `nodes.node_look.equipment`
    canary: str  # contents of the file that the conductor wrote into the run directory; empty: it is not there
    run_dir: str  # why the run directory cannot be written; empty: it can
    places: tuple[Place, ...] = ()
    free_bytes: int = UNKNOWN  # in the run directory
    free_files: int = UNKNOWN
    shm_free: int = UNKNOWN
    shm: str = ""  # why /dev/shm cannot be written
    memlock: int = UNKNOWN  # bytes that a process may lock; UNKNOWN: no limit
    most_files: int = UNKNOWN  # files that a process may open; UNKNOWN: no limit
    infiniband: bool = False
    compiler: str = ""  # parts that are missing to compile for Python; empty: none
    locks: tuple[str, ...] = ()  # stale locks of torch extensions: nobody builds these now
    addresses: tuple[str, ...] = ()
    interface: str = ""  # interface on the way to the conductor
    address: str = ""
    link_mbits: int = 0  # speed of that interface by the kernel; 0: unknown
    subnet: str = ""
    exported: tuple[str, ...] = ()  # problems with NCCL_SOCKET_IFNAME and the like
    unhealthy: tuple[str, ...] = ()  # GPUs with errors of memory, or throttled
    sandbox: str = ""  # kind that programs run in; empty: not asked, or none
    no_sandbox: str = ""  # why there is none
    skew_s: float = 0.0  # its clock minus the conductor's, less the error of measuring
    reached: tuple[Reach, ...] = ()


WORKER_MODULE = "slurm_rlhf.ranks.rank_process"
RANK_MAP = "rank_map.json"
"""Name of a file in the run directory that says who is where."""
TORCHRUN_MODULE = "slurm_rlhf.ranks.torchrun"


@dataclass(frozen=True, slots=True)
class StepSpec:
    """Describe the processes of `role` in the run in `run_dir`.

    `run_id` names this start of the role, the same on every node. `environment` maps a node to the variables of the
    role's processes there. `engines`: numbers of the engines to start; None: all of the node. `store`: where the
    torchrun of the role's first node listens, as host:port; empty: this is the first node. `caches`: what libraries
    compile goes to the node's own disk, as the user's directories may be on a shared one.
    """

    role: str
    run_dir: str
    run_id: str
    arguments: list[str]
    environment: Mapping[str, Mapping[str, str]]
    engines: list[int] | None = None
    store: str = ""
    caches: bool = True


def share_on(ranks: RankMap, role: str, node: str) -> NodeShare:
    """Return the role's part of `node`. Raises PlacementError when the rank map gives it none there."""
    for share in ranks.roles[role]:
        if share.node == node:
            return share
    places = ", ".join(share.node for share in ranks.roles[role])
    raise PlacementError(f"{role} was started on {node}, but the rank map has it on {places}")


def worker_arguments(ranks: RankMap, role: str, share: NodeShare) -> list[str]:
    """Tell the workers of `role` on one node which ranks of the rank map they are."""
    return [f"--first_rank={share.ranks[0]}", f"--world={ranks.world(role)}"]


def torchrun_command(spec: StepSpec, ranks: RankMap, node: str, log_dir: str) -> list[str]:
    """Return the torchrun command line of `spec` on `node`."""
    share, shares = share_on(ranks, spec.role, node), ranks.roles[spec.role]
    # A role on one node has its store bind port 0 itself: another process could take a port chosen beforehand.
    store = spec.store or f"{shares[0].node if len(shares) > 1 else LOOPBACK}:0"
    return [
        sys.executable,
        "-m",
        TORCHRUN_MODULE,
        # torch's own rendezvous backends would listen on every address of the node.
        f"--nnodes={len(shares)}",
        "--rdzv-backend=bound",
        f"--rdzv-endpoint={store}",
        f"--rdzv-conf=rank={shares.index(share)}",
        f"--nproc-per-node={len(share.ranks)}",
        f"--rdzv-id={spec.run_id}.{spec.role}",
        "--max-restarts=0",
        "--monitor-interval=0.2",
        f"--shutdown-timeout={timeouts.TORCHRUN_END_S}",
        f"--role={spec.role}",
        f"--log-dir={log_dir}",
        "-m",
        WORKER_MODULE,
        *spec.arguments,
        *worker_arguments(ranks, spec.role, share),
    ]
