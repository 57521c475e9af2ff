"""Rules over the keys of the algorithm and its loss."""

from __future__ import annotations

from collections.abc import Iterator

from slurm_rlhf.config.roles import algorithm_of
from slurm_rlhf.config.rule import row_problems, where_set
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ConfigError

TYPE, EPS_CLIP = "actor.policy_loss_type", "actor.eps_clip"


def algorithm_problems(config: Config) -> Iterator[str]:
    """Check what the algorithm needs."""
    try:
        algorithm = algorithm_of(config)
    except ConfigError as error:
        yield str(error)
        return
    advantage, rollout = config.algo.advantage, config.rollout
    yield from row_problems(
        "algorithm",
        config,
        algorithm=algorithm,
        twice=len(set(advantage.gdpo_reward_keys)) < len(advantage.gdpo_reward_keys),
        any_weight=any(advantage.gdpo_reward_weights),
        shortest=rollout.repetition_detection_min_pattern_size * rollout.repetition_detection_min_count,
    )


def loss_problems(config: Config) -> Iterator[str]:
    """Check the keys of the policy loss."""
    from slurm_rlhf.algorithms.policy_losses import POLICY_LOSSES

    algorithm, chosen = algorithm_of(config), POLICY_LOSSES[config.actor.policy_loss_type]
    yield from row_problems("loss", config, algorithm=algorithm, loss=chosen)
    if algorithm.policy_loss is not None:
        return
    for leaf in dict.fromkeys(leaf for row in POLICY_LOSSES.values() for leaf in row.keys):
        if leaf not in chosen.keys:  # the run would be another than its author thinks
            name, users = f"actor.{leaf}", " and ".join(row.name for row in POLICY_LOSSES.values() if leaf in row.keys)
            own = ", set actor.eps_clip_low_high for its range" if name == EPS_CLIP and chosen.clip_range else ""
            why = f"has no effect with {TYPE} = {chosen.name}, it belongs to {users}: leave it out{own}"
            yield from where_set(config, [name], why)
