"""Ratios of the new to the old policy, and what every loss of them reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slurm_rlhf.algorithms.masked import actions_only, masked_sum, step_mean, weighed_sum
from slurm_rlhf.algorithms.policy_distance import MAX_LOG_RATIO
from slurm_rlhf.algorithms.policy_losses.inputs import Metrics, PolicyInputs

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Ratios:
    """Hold the columns of a micro-batch that losses are made of, [A] each, zero at masked positions."""

    logprobs: Tensor  # with gradient
    advantages: Tensor
    log_ratio: Tensor  # log pi / pi_old, within +-20, with gradient where it was not clamped

    @classmethod
    def of(cls, inputs: PolicyInputs) -> Ratios:
        """Take the ratios; clamped, so that exp does not overflow: beyond +-20 a token gives no gradient through it."""
        mask = inputs.action_mask
        new, old = actions_only(inputs.logprobs, mask), actions_only(inputs.old_logprobs, mask)
        advantages = actions_only(inputs.advantages, mask)
        return cls(new, advantages, (new - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def k3(log_ratio: Tensor) -> Tensor:
    """Estimate KL(p || q) per element as exp(r) - 1 - r, which is never negative, for r = log(q / p) at samples of p.

    r is clamped at 20 before exp and not after: clamping the result leaves 0 * inf = NaN as its gradient.
    Source: as `policy_distance.approx_kl`.
    """
    log_ratio = log_ratio.clamp(max=MAX_LOG_RATIO)
    return log_ratio.expm1() - log_ratio


def aggregated(
    inputs: PolicyInputs, losses: Tensor, log_ratio: Tensor, ratio: Tensor, clipped: Tensor | None
) -> tuple[Tensor, Metrics]:
    """Weigh and add up the losses [A] of a micro-batch, and divide by the number of the whole optimizer step.

    Metrics, sums over actions without the weights: policy_loss; ratio, as it enters the loss; approx_kl (k3 of old
    against new policy); clip_fraction of `clipped` (bool [A]: tokens whose gradient is cut off; None: no such metric).
    """
    mask = inputs.action_mask
    total = masked_sum(losses, mask)
    metrics = {"policy_loss": total.detach(), "ratio": masked_sum(ratio.detach(), mask)}
    if clipped is not None:
        metrics["clip_fraction"] = masked_sum(clipped.to(ratio.dtype), mask)
    metrics["approx_kl"] = masked_sum(k3(log_ratio.detach()), mask)
    if inputs.weights is not None:
        total = weighed_sum(losses, inputs.weights, mask)
    return step_mean(total, inputs.denominator), metrics
