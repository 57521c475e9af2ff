"""GPUs for the processes of a test: none in the ordinary run, the acceptance kit's where it says so.

The kit names them in one variable, and the helpers that start whole runs or single ranks ask here.
"""

from __future__ import annotations

import os

GPUS = "SLURM_RLHF_TEST_GPUS"
"""Names the variable with CUDA_VISIBLE_DEVICES for a whole run; not set or empty: the tests stay on CPUs."""


def visible() -> str:
    """CUDA_VISIBLE_DEVICES for a whole run."""
    return os.environ.get(GPUS, "")


def gpu_environment(number: int) -> dict[str, str]:
    """Variables for the single process `number`, which has one GPU; nothing without GPUs.

    NCCL refuses two ranks on one GPU by the hash of their host and the GPU's bus ("Duplicate GPU detected"). With a
    host of its own each rank passes, and NCCL talks over sockets.
    """
    gpus = [name for name in visible().split(",") if name]
    if not gpus:
        return {}
    found = {"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)], "NCCL_HOSTID": f"rank{number}"}
    # Ranks that pass for hosts of their own meet over the machine's own network.
    return found | {"NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo")}


def device() -> str:
    """Where a process with an environment of `gpu_environment` keeps its weights."""
    return "cuda" if visible() else "cpu"
