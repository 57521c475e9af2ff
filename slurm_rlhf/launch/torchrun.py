"""The torchrun command line of one role on one node: pure text."""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TorchrunPlan:
    """One torchrun process: `processes` ranks of `role` on one node."""

    role: str
    processes: int
    run_id: str
    log_dir: str


def command(plan: TorchrunPlan, module: str, arguments: list[str]) -> list[str]:
    """Argument vector that runs `module` under torchrun on this node alone.

    The rendezvous store binds port 0 itself and the workers share it, so no port is chosen by us that somebody
    else could take in between.
    """
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=1",
        f"--nproc-per-node={plan.processes}",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
        "--local-addr=127.0.0.1",  # torchrun would tell the workers a host name, which need not resolve
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
