"""The environment variables that the processes of each role start with: a pure function."""

from __future__ import annotations

from slurm_rlhf.cluster.placement import RankMap
from slurm_rlhf.config.schema import Config

TRAINERS = ("actor", "critic", "reference")


def role_environment(config: Config, ranks: RankMap, cpus: int) -> dict[str, dict[str, str]]:
    """role -> variables, for a node with `cpus` CPUs that holds every role.

    Trainers compute side by side and rollout alone, so each gets the share of the CPUs of its own phase. Threads
    that wait do not spin: on shared cores a spinning thread takes the time of the role that has work.
    """
    together = sum(ranks.world(role) for role in ranks.roles if role in TRAINERS)
    environment = {}
    for role in ranks.roles:
        rivals = together if role in TRAINERS else ranks.world(role)
        threads = config.train.threads_per_rank or max(1, cpus // max(1, rivals))
        environment[role] = {
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            "KMP_BLOCKTIME": "0",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
        }
    return environment
