"""The environment variables that the processes of each role start with: a pure function."""

from __future__ import annotations

from slurm_rlhf.cluster.placement import RankMap
from slurm_rlhf.cluster.topology import GPU
from slurm_rlhf.config.schema import Config

TRAINERS = ("actor", "critic", "reference")


def role_environment(config: Config, ranks: RankMap, cpus: int) -> dict[str, dict[str, str]]:
    """role -> variables, for a single node with `cpus` CPUs that holds every role.

    The rank map, and not luck, decides which GPUs a role sees. Trainers compute side by side and rollout alone, so each
    gets the share of the CPUs of its own phase. Threads that wait do not spin: on shared cores a spinning thread takes
    the time of the role that has work.
    """
    together = sum(ranks.world(role) for role in ranks.roles if role in TRAINERS)
    environment = {}
    for role, shares in ranks.roles.items():
        rivals = together if role in TRAINERS else ranks.world(role)
        threads = config.train.threads_per_rank or max(1, cpus // max(1, rivals))
        gpus = ranks.topology.node(shares[0].node).visible(shares[0].gpus) if ranks.topology.accelerator == GPU else ""
        environment[role] = {
            "CUDA_VISIBLE_DEVICES": gpus,
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            "KMP_BLOCKTIME": "0",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            # One machine: nothing of the run is reachable from outside it, whatever its host name resolves to.
            "GLOO_SOCKET_IFNAME": "lo",
            "VLLM_HOST_IP": "127.0.0.1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
        }
    return environment
