"""PPO: a critic's values, generalized advantage estimation.

Sources: Schulman et al., Proximal Policy Optimization (2017); Ouyang et al., Training language models to follow
instructions (2022).
"""

from __future__ import annotations

from slurm_rlhf.algorithms.advantages import gae, token_rewards
from slurm_rlhf.algorithms.registry import AdvantageInputs, Algorithm
from slurm_rlhf.records import F32


def gae_advantages(inputs: AdvantageInputs) -> tuple[F32, F32]:
    """Estimate advantages from the KL penalty and the clipped reward per token, by `advantages.gae`.

    The returns for the critic may have a lambda of their own. With 1 the critic learns the reward without the bias of
    its own guesses; a smaller lambda for the policy keeps its advantages less noisy. Source: Yuan et al., What's Behind
    PPO's Collapse in Long-CoT? (2025), arXiv 2503.01491, and VAPO (2025), arXiv 2504.05118: decoupled GAE.
    """
    assert inputs.values is not None
    rewards = token_rewards(
        inputs.kl, inputs.kl_coef, inputs.rewards, inputs.action_mask, inputs.offsets, inputs.clip_range
    )
    layout = (rewards, inputs.values, inputs.action_mask, inputs.offsets, inputs.gamma)
    advantages, returns = gae(*layout, inputs.lambd)
    if inputs.lambd_critic not in (None, inputs.lambd):
        returns = gae(*layout, inputs.lambd_critic)[1]
    return advantages, returns


GAE = Algorithm("gae", gae_advantages, needs_critic=True, whiten=True)
