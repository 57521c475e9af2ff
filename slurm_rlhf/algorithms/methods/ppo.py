"""PPO: a critic's values, generalized advantage estimation.

Sources: Schulman et al., Proximal Policy Optimization (2017); Ouyang et al., Training language models to follow
instructions (2022).
"""

from __future__ import annotations

from slurm_rlhf.algorithms.advantages import gae, token_rewards
from slurm_rlhf.algorithms.registry import AdvantageInputs, Algorithm
from slurm_rlhf.records import F32


def gae_advantages(inputs: AdvantageInputs) -> tuple[F32, F32]:
    """Estimate advantages from the KL penalty and the clipped reward per token, by `advantages.gae`."""
    assert inputs.values is not None
    rewards = token_rewards(
        inputs.kl, inputs.kl_coef, inputs.rewards, inputs.action_mask, inputs.offsets, inputs.clip_range
    )
    return gae(rewards, inputs.values, inputs.action_mask, inputs.offsets, inputs.gamma, inputs.lambd)


GAE = Algorithm("gae", gae_advantages, needs_critic=True, whiten=True)
