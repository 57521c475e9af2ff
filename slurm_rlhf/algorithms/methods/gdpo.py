"""GDPO: several rewards, each compared within its group before they are added up.

Source: Liu et al., GDPO: Group reward-Decoupled Normalization Policy Optimization (2026), arXiv 2601.05242.
"""

from __future__ import annotations

import numpy as np

from slurm_rlhf.algorithms.groups import clipped, normed
from slurm_rlhf.algorithms.methods.reinforce import returns_to_go
from slurm_rlhf.algorithms.registry import AdvantageInputs, Algorithm
from slurm_rlhf.errors import ConfigError
from slurm_rlhf.records import F32


def gdpo(inputs: AdvantageInputs) -> tuple[F32, None]:
    """Add up the rewards after each was normalised in its group: A = sum_k w_k (R_k - mean_k) / (std_k + 1e-6).

    Added first and normalised then, as in GRPO, different combinations of rewards fall together, and the reward with
    the largest spread decides. A reward without spread in a group adds nothing there. The result is whitened over the
    tokens of the batch, as in verl and in the authors' code for it; the paper and TRL take mean and standard deviation
    over the responses. Each component is clipped by reward.clip_range.

    Takes the components that `algo.advantage.gdpo_reward_keys` names, with the weights of
    `algo.advantage.gdpo_reward_weights`, or all of them with weight 1. Raises ConfigError if a component is missing.
    """
    names = list(inputs.component_weights or inputs.components)
    if not inputs.components:
        raise ConfigError(
            "algo.advantage.estimator = gdpo takes several rewards for each response, and the reward function answered "
            'one: let it return {"rewards": ..., "components": {"name": one number per response, ...}}'
        )
    for name in names:
        if name not in inputs.components:
            raise ConfigError(
                f"algo.advantage.gdpo_reward_keys names the component {name!r}, and the reward function answered "
                f"{', '.join(map(repr, inputs.components))}: correct the key or the function"
            )
    total = np.zeros(len(inputs.groups))
    for name in names:
        component = clipped(inputs.components[name], inputs.clip_range)
        total += inputs.component_weights.get(name, 1.0) * normed(component, inputs.groups, inputs.no_std_norm)
    return returns_to_go(inputs, total)


GDPO = Algorithm("gdpo", gdpo, min_samples_per_prompt=2, whiten=True, divides_by_spread=True, needs_components=True)
