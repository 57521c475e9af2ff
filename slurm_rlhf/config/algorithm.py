"""What the chosen algorithm and the KL penalty ask for: which roles a run starts follows from here."""

from __future__ import annotations

from slurm_rlhf.algorithms.plugins import load_plugins
from slurm_rlhf.algorithms.registry import Algorithm, find_algorithm
from slurm_rlhf.config.schema import Config


def algorithm_of(config: Config) -> Algorithm:
    """Find the algorithm that `config` names, after running the user's files. Raises ConfigError."""
    load_plugins(config.train.plugins)
    return find_algorithm(config.algo.advantage.estimator)


def has_critic(config: Config) -> bool:
    """Say whether a value model is trained."""
    return algorithm_of(config).needs_critic


def has_reference(config: Config) -> bool:
    """Say whether a frozen policy runs: where the KL to it counts, or the algorithm needs it."""
    return config.algo.kl.init_coef != 0 or algorithm_of(config).needs_reference
