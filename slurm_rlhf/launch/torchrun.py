"""The torchrun command line of one role on one node: pure text."""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the torchruns of a role on several nodes find each other; the first node's opens the port."""

    address: str
    port: int
    nodes: int
    node_rank: int


@dataclass(frozen=True, slots=True)
class TorchrunPlan:
    """One torchrun process: `processes` ranks of `role` on one node, alone or with others of its kind."""

    role: str
    processes: int
    run_id: str
    log_dir: str
    meeting: Meeting | None = None


def command(plan: TorchrunPlan, module: str, arguments: list[str]) -> list[str]:
    """Argument vector that runs `module` under this torchrun.

    Alone, the rendezvous store binds port 0 itself and the workers share it, so no port is chosen by us that somebody
    else could take in between.
    """
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *_rendezvous(plan.meeting),
        f"--nproc-per-node={plan.processes}",
        f"--rdzv-id={plan.run_id}.{plan.role}",
        "--max-restarts=0",
        "--monitor-interval=0.2",
        "--shutdown-timeout=3",
        f"--role={plan.role}",
        f"--log-dir={plan.log_dir}",
        "-m",
        module,
        *arguments,
    ]


def _rendezvous(meeting: Meeting | None) -> list[str]:
    if meeting is None:
        return [
            "--nnodes=1",
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=127.0.0.1:0",
            "--local-addr=127.0.0.1",  # torchrun would tell the workers a host name, which need not resolve
        ]
    # Not c10d: it takes no notice of --node-rank and numbers the nodes by their addresses' spelling.
    return [
        f"--nnodes={meeting.nodes}",
        f"--node-rank={meeting.node_rank}",
        "--rdzv-backend=static",
        f"--master-addr={meeting.address}",
        f"--master-port={meeting.port}",
    ]
