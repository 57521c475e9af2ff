"""The environment variables of the processes of a run: above all, how many threads each may have."""

from __future__ import annotations

from slurm_rlhf.config.roles import ACTOR, ROLES, ROLLOUT
from slurm_rlhf.config.schema import Config
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.placement.topology import GPU

WAITING_THREADS = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
"""Variables by which threads that wait do not spin: on shared cores they take the time of whoever has work."""


def role_environment(config: Config, ranks: RankMap, cpus: int) -> dict[str, dict[str, dict[str, str]]]:
    """Choose the environment variables of each role on each node: role -> node -> variables.

    `cpus`: of nodes for which the topology has no number.

    While engines sample the other roles wait, and the other way round: each rank gets its share of the node's CPUs
    among the ranks that compute at the same time, and none of its threads spins while it waits.
    """
    nodes = {share.node for shares in ranks.roles.values() for share in shares}
    environment: dict[str, dict[str, dict[str, str]]] = {role: {} for role in ranks.roles}
    for node in nodes:
        here = {
            role: len(share.ranks) for role, shares in ranks.roles.items() for share in shares if share.node == node
        }
        for role in here:
            samples = ROLES[role].kind == "engine"
            rivals = sum(count for other, count in here.items() if (ROLES[other].kind == "engine") == samples)
            threads = config.train.threads_per_rank or max(1, (ranks.topology.node(node).cpus or cpus) // rivals)
            environment[role][node] = _variables(threads, alone=len(nodes) == 1) | _allocator(config, ranks, role)
    return environment


def _allocator(config: Config, ranks: RankMap, role: str) -> dict[str, str]:
    """Let PyTorch grow pieces of GPU memory, so that rows of ever other lengths leave no gaps, where that is safe.

    Such memory cannot be mapped by another process, as weights of the actor are, and engines have it in pools that
    sleep. Where all roles take turns it would not be given back in time.
    """
    if ranks.topology.accelerator != GPU or config.train.colocate_all or role in (ACTOR, ROLLOUT):
        return {}
    return {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def _variables(threads: int, alone: bool) -> dict[str, str]:
    variables = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
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
    # One machine: nothing of the whole run is.
    return {**variables, "GLOO_SOCKET_IFNAME": "lo"} if alone else variables
