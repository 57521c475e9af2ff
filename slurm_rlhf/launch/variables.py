"""The environment of a role's processes on one node: pure functions over tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slurm_rlhf.cluster.kernel_cache import cache_variables

INJECTED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What hooks of containers and sites set, and torchrun's workers or vLLM would believe."""

INJECTED_PREFIXES = ("PMI_", "PMI2_", "PMIX_", "OMPI_")

INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
"""Which network interface collectives start from. InfiniBand is NCCL_IB_HCA, which NCCL finds by itself."""


def diagnosis_variables(role: str, logs: Path) -> dict[str, str]:
    """What makes a hang of NCCL explain itself, in `logs`: dumps in a node's own /tmp are lost with the job."""
    trace = str(logs / f"nccl_trace.{role}.")
    return {
        # Both spellings: torch reads the new one and falls back to the old one, libraries read either.
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": trace,
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": trace,
        "NCCL_DEBUG": "WARN",
        "NCCL_DEBUG_FILE": str(logs / f"nccl.{role}.%h.%p.log"),
    }


def without_injected(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` of a process that is nobody's rank."""
    return {
        name: value
        for name, value in environ.items()
        if name not in INJECTED and not name.startswith(INJECTED_PREFIXES)
    }


def node_environment(
    environ: Mapping[str, str], role: str, logs: Path, cache: Path, own: Mapping[str, str], interface: str
) -> dict[str, str]:
    """The whole environment of `role` on a node, from that of the step.

    What the user exported wins over our diagnosis settings and over `interface` (empty: not known); `cache`, where
    what is compiled goes if train.kernel_cache keeps nothing, and `own`, the role's variables, win over what the user
    exported.
    """
    kept = without_injected(environ)
    networks = dict.fromkeys(INTERFACES, interface) if interface else {}
    return {**diagnosis_variables(role, logs), **networks, **kept, **cache_variables(cache), **own}
