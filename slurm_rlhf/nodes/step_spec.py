"""Describe what is started of a role, and write it as a torchrun command line."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from slurm_rlhf.cluster.network import LOOPBACK
from slurm_rlhf.errors import PlacementError
from slurm_rlhf.placement.rank_map import NodeShare, RankMap
from slurm_rlhf.wire import timeouts

WORKER_MODULE = "slurm_rlhf.ranks.rank_process"
RANK_MAP = "rank_map.json"
"""Name of a file in the run directory that says who is where."""
TORCHRUN_MODULE = "slurm_rlhf.ranks.torchrun"


@dataclass(frozen=True, slots=True)
class StepSpec:
    """Describe the processes of `role` in the run in `run_dir`.

    `run_id` names this start of the role, the same on every node. `environment` maps a node to the variables of the
    role's processes there. `engines`: those of a node that are meant; None: all. `store`: where the first of the
    role listens, as host:port; empty: this is the first. `caches`: what libraries compile goes to the node's own disk,
    as the user's directories may be on a shared one.
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
    share = share_on(ranks, spec.role, node)
    return [
        sys.executable,
        "-m",
        TORCHRUN_MODULE,
        *_rendezvous(spec, ranks, share),
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


def _rendezvous(spec: StepSpec, ranks: RankMap, share: NodeShare) -> list[str]:
    """Say where the torchruns meet. Not by torch's own ways: those listen on every address of the node."""
    shares = ranks.roles[spec.role]
    # Alone on its node, the store binds port 0 itself: no other process can take a port chosen beforehand.
    store = spec.store or f"{shares[0].node if len(shares) > 1 else LOOPBACK}:0"
    return [
        f"--nnodes={len(shares)}",
        "--rdzv-backend=bound",
        f"--rdzv-endpoint={store}",
        f"--rdzv-conf=rank={shares.index(share)}",
    ]
