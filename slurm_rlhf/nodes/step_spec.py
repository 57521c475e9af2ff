"""Describe the step of a role, as a file that its nodes read and as a torchrun command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from slurm_rlhf.errors import PlacementError
from slurm_rlhf.placement.rank_map import NodeShare, RankMap
from slurm_rlhf.placement.topology import GPU
from slurm_rlhf.run_directory import write_atomically
from slurm_rlhf.wire import timeouts

WORKER_MODULE = "slurm_rlhf.ranks.rank_process"
TORCHRUN_MODULE = "slurm_rlhf.ranks.torchrun"


@dataclass(frozen=True, slots=True)
class StepSpec:
    """Describe the step of `role` in the run in `run_dir`.

    `run_id` names this start of the role, the same on every node. In the file `meeting` of `.control` the torchrun of
    the first node says at which port the others find it; empty: each works alone on its node, so that none ends when
    another node does. `environment` maps a node to the
    variables of the role's processes there. `engines`: those of a node that are meant; None: all.
    """

    role: str
    run_dir: str
    run_id: str
    arguments: list[str]
    environment: Mapping[str, Mapping[str, str]]
    meeting: str = ""
    engines: list[int] | None = None

    def write(self, path: Path) -> None:
        """Write it as JSON; readers find a whole file or none."""
        write_atomically(path, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> StepSpec:
        return cls(**json.loads(path.read_text(encoding="utf-8")))


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
    if not spec.meeting:
        # The store binds port 0 itself and the workers share it: no other process can take a port chosen beforehand.
        nodes, rank, world, where = 1, 0, len(share.ranks), "127.0.0.1:0"
    else:
        shares = ranks.roles[spec.role]
        nodes, rank, world = len(shares), shares.index(share), ranks.world(spec.role)
        where = f"{shares[0].node}:0"
    if ranks.topology.accelerator == GPU:
        world = 0  # the store listens on: NCCL makes connections to it when it likes
    return [
        f"--nnodes={nodes}",
        "--rdzv-backend=bound",
        f"--rdzv-endpoint={where}",
        f"--rdzv-conf=rank={rank},ranks={world}" + (f",meeting={spec.meeting}" if spec.meeting else ""),
    ]
