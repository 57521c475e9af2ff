"""The loss of PPO as a function of its tensors."""

from __future__ import annotations

from torch import Tensor

from slurm_rlhf.algorithms.losses import Metrics, PolicyInputs
from slurm_rlhf.algorithms.policy_losses import ppo_loss


def policy_loss(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    denominator: float,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Metrics]:
    """Compute the loss and metrics of one micro-batch that is a single response."""
    inputs = PolicyInputs(logprobs, old, advantages, mask, [len(mask)], None, denominator, clip_low, clip_high)
    return ppo_loss(inputs)
