"""Losses beside the policy's own: of the value model, and the terms that are added to a policy loss.

A loss is a sum over the tokens of one micro-batch, divided by one number for the whole optimizer step, over all
micro-batches and data-parallel ranks (`aggregation`): adding the gradients of all of them gives the exact mean, and
not a mean of means. Metrics are detached sums over actions: add them up over micro-batches and ranks, then divide by
the number of actions of the step.

What stands at masked positions reaches nothing (`masked`). A micro-batch without actions gives a loss of 0 that is
still connected to its inputs, so that `backward` runs on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurm_rlhf.algorithms.masked import actions_only, masked_sum, step_mean, weighed_sum
from slurm_rlhf.algorithms.policy_losses.inputs import Metrics

if TYPE_CHECKING:  # losses call methods of tensors only, so that this room needs no torch
    from torch import Tensor


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    action_mask: Tensor,
    denominator: float,
    value_clip: float,
) -> tuple[Tensor, Metrics]:
    """Compute half the squared error of the value model, a scalar.

        sum over actions of  max((V - R)^2, (V_old + clip(V - V_old, -value_clip, value_clip) - R)^2) / 2 / denominator

    values [A] (with gradient), old_values [A], returns [A]; value_clip 0: (V - R)^2 / 2.
    Metrics: value_loss, value_clip_fraction (actions beyond value_clip where the clipped term is the larger one).
    Source: OpenAI baselines, `ppo2/model.py`; Huang et al., The 37 Implementation Details of PPO (2022), no. 9.
    """
    value, old = actions_only(values, action_mask), actions_only(old_values, action_mask)
    target = actions_only(returns, action_mask)
    plain = (value - target) ** 2
    clipped = plain
    if value_clip > 0:
        clipped = (old + (value - old).clamp(-value_clip, value_clip) - target) ** 2
    total = masked_sum(plain.maximum(clipped), action_mask) / 2
    # Within the clip range the two terms differ by rounding alone.
    effective = (clipped > plain) & ((value - old).abs() > value_clip)
    metrics = {
        "value_loss": total.detach(),
        "value_clip_fraction": masked_sum(effective.to(value.dtype), action_mask),
    }
    return step_mean(total, denominator), metrics


def entropy_bonus(
    entropy: Tensor, action_mask: Tensor, denominator: float, coef: float, weights: Tensor | None = None
) -> tuple[Tensor, Metrics]:
    """Compute -coef times the entropy of the policy at its actions, aggregated as the policy loss is: a scalar to add.

        sum over actions of  -coef * w * entropy  / denominator

    entropy [A] in nats, at the temperature that the log-probs were taken at; weights [A] of the aggregation, None: 1.
    Metrics: entropy.
    """
    clean = actions_only(entropy, action_mask)
    total = masked_sum(clean, action_mask)
    mean = step_mean(total if weights is None else weighed_sum(clean, weights, action_mask), denominator)
    return -coef * mean, {"entropy": total.detach()}
