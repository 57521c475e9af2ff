"""Say what the processes of a role get on a node: variables, threads, visible GPUs, the network interface."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurm_rlhf.cluster.local_directory import cache_variables
from slurm_rlhf.cluster.network import address_towards, interface_of
from slurm_rlhf.config.roles import ACTOR, ROLES, ROLLOUT
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import PlacementError
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.placement.topology import GPU, Topology

INJECTED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables that hooks of containers and sites set, and that torchrun's workers or engines would take for ours."""

INJECTED_PREFIXES = ("PMI_", "PMI2_", "PMIX_", "OMPI_")

INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
"""Variables that name the network interface of collectives. NCCL finds InfiniBand (NCCL_IB_HCA) by itself."""

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Variable that names a process's GPUs."""

IGNORED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
"""Signals to a step reach every process in it, torchrun included; only the conductor reacts to them."""


def without_injected(environ: Mapping[str, str]) -> dict[str, str]:
    """Copy `environ` without the variables that describe a rank."""
    return {
        name: value
        for name, value in environ.items()
        if name not in INJECTED and not name.startswith(INJECTED_PREFIXES)
    }


def node_environment(
    environ: Mapping[str, str],
    role: str,
    logs: Path,
    temporary: Path,
    own: Mapping[str, str],
    interface: str,
    caches: bool = True,
) -> dict[str, str]:
    """Return the whole environment of `role` on a node, made from that of the step.

    What the user exported wins over our diagnosis settings and over `interface` (empty: unknown). Two things win over
    what the user exported: `own`, the role's variables, and `temporary`, the directory for temporary files, with
    `caches` also for compiled kernels if train.kernel_cache keeps none.
    """
    kept = without_injected(environ)
    if "SLINGSHOT_VNIS" in kept:
        # The network lets equal numbers meet, and libfabric takes the first: the step's own. The last one is the job's,
        # with sbatch --network=job_vni. Weights go from step to step.
        kept["SLINGSHOT_VNIS"] = kept["SLINGSHOT_VNIS"].rpartition(",")[2]
    networks = dict.fromkeys(INTERFACES, interface) if interface else {}
    local = {**(cache_variables(temporary) if caches else {}), "TMPDIR": str(temporary)}
    diagnosis = {  # NCCL writes why it hangs; a node's own /tmp is lost with the job
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": str(logs / f"nccl_trace.{role}."),
        "NCCL_DEBUG": "WARN",
        "NCCL_DEBUG_FILE": str(logs / f"nccl.{role}.%h.%p.log"),
    }
    return {**diagnosis, **networks, **kept, **local, **own}


def visible_gpus(topology: Topology, node: str, slots: Sequence[int], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable with which a process on `node` sees the GPUs of `slots`, in that order.

    Slurm numbers the devices it granted, or renumbers them if it confines the job to them; `environ` of the step says
    which, and slot i is the i-th of them. Raises PlacementError when fewer were granted than the rank map uses.
    """
    return {VISIBLE: _devices(topology, node, slots, environ) if topology.accelerator == GPU else ""}


def _devices(topology: Topology, node: str, slots: Sequence[int], environ: Mapping[str, str]) -> str:
    known = topology.node(node)
    granted = [device for device in environ.get(VISIBLE, "").split(",") if device and device != "NoDevFiles"]
    if known.devices or not granted:
        return known.visible(slots)
    if max(slots) >= len(granted):
        raise PlacementError(
            f"node {node}: the rank map uses GPU {max(slots)}, but the step was granted {len(granted)} "
            f"({','.join(granted)}): ask for all of them with --gpus-per-node"
        )
    return ",".join(granted[slot] for slot in slots)


def interface_to_others(ranks: RankMap, node: str) -> str:
    """Return the interface towards another node of the run; loopback if there is no other node."""
    others = (share.node for shares in ranks.roles.values() for share in shares if share.node != node)
    other = next(others, None)
    return interface_of(address_towards(other)) if other else "lo"


WAITING_THREADS = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
"""Variables that keep waiting threads from spinning: on shared cores they would take time from those with work."""

_OF_ALL = {
    **WAITING_THREADS,
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    # An engine lives on one node: nothing of it is to be reached from outside, whatever the host name resolves to.
    "VLLM_HOST_IP": "127.0.0.1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",
}
"""Variables of every role."""


def role_environment(config: Config, ranks: RankMap, cpus: int) -> dict[str, dict[str, dict[str, str]]]:
    """Choose the environment variables of each role on each node: role -> node -> variables.

    `cpus`: of nodes for which the topology has no number.

    While engines sample the other roles wait, and the other way round: each rank gets its share of the node's CPUs
    among the ranks that compute at the same time, and none of its threads spins while it waits.
    """
    nodes = {share.node for shares in ranks.roles.values() for share in shares}
    # On one machine nothing of the whole run is to be reached from outside.
    inside = {"GLOO_SOCKET_IFNAME": "lo"} if len(nodes) == 1 else {}
    environment: dict[str, dict[str, dict[str, str]]] = {role: {} for role in ranks.roles}
    for node in nodes:
        here = {
            role: len(share.ranks) for role, shares in ranks.roles.items() for share in shares if share.node == node
        }
        for role in here:
            samples = ROLES[role].kind == "engine"
            rivals = sum(count for other, count in here.items() if (ROLES[other].kind == "engine") == samples)
            threads = config.train.threads_per_rank or max(1, (ranks.topology.node(node).cpus or cpus) // rivals)
            own = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
            if config.sync.interface and role in (ACTOR, ROLLOUT):  # NCCL reads it once, before weights are sent
                own["NCCL_SOCKET_IFNAME"] = f"={config.sync.interface}"  # `=`: exactly this name
            environment[role][node] = own | _OF_ALL | inside | allocator(config, ranks, role)
    return environment


def allocator(config: Config, ranks: RankMap, role: str) -> dict[str, str]:
    """Let PyTorch expand segments of GPU memory where that is safe: rows of varying lengths then leave no gaps.

    Not for the actor, whose weights another process maps, which such memory does not allow; not for engines, whose
    memory is in pools that sleep; nor where all roles take turns: it would not be given back in time.
    """
    mapped = role in (ACTOR, ROLLOUT) and ROLLOUT in ranks.roles
    if ranks.topology.accelerator != GPU or config.train.colocate_all or mapped:
        return {}
    return {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
