"""Describe what a policy loss takes and returns, with ratios and metrics that all share, and check a user's loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slurm_rlhf.algorithms.packed import actions_only, masked_sum, step_mean, weighed_sum
from slurm_rlhf.algorithms.policy_distance import MAX_LOG_RATIO
from slurm_rlhf.errors import ConfigError
from slurm_rlhf.user_files import file_of, line_of, text_of

if TYPE_CHECKING:
    from torch import Tensor

Metrics = dict[str, "Tensor"]


@dataclass(frozen=True, slots=True)
class PolicyInputs:
    """Hold everything that a policy loss may look at: one micro-batch of n responses, packed."""

    logprobs: Tensor  # [A], with gradient
    old_logprobs: Tensor  # [A]
    advantages: Tensor  # [A]
    action_mask: Tensor  # bool [A]
    response_lens: list[int]  # [n], tokens of each response; their sum is A
    weights: Tensor | None  # [A], of the loss of each token, 0 and fractions included; None: 1 for every action
    denominator: float
    clip_low: float
    clip_high: float
    dual_clip: float = 0.0  # 0: off
    sapo_temperatures: tuple[float, float] = (1.0, 1.05)  # for advantages above 0, and for the others


PolicyLoss = Callable[[PolicyInputs], tuple["Tensor", Metrics]]
"""Inputs -> (loss, a scalar with gradient; detached sums over the actions by name)."""


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


def checked_loss(name: str, function: PolicyLoss) -> PolicyLoss:
    """Guard the policy loss of algorithm `name`: errors name its file and line and say what to do.

    The guarded loss raises ConfigError when `function` raises, or answers anything but (scalar with gradient, metrics).
    """
    source, what = file_of(function), f"the policy loss of algorithm {name!r}"

    def call(inputs: PolicyInputs) -> tuple[Tensor, Metrics]:
        try:
            loss, metrics = function(inputs)
            scalar = loss.dim() == 0 and loss.requires_grad
            sums = {key: value.detach() for key, value in metrics.items() if value.dim() == 0}
        except Exception as error:
            raise ConfigError(
                f"{line_of(source, error)}: {what} raised {text_of(error)}. It answers the loss, and a dict of sums "
                "over the actions, all of them tensors"
            ) from error
        if not scalar or len(sums) < len(metrics):
            raise ConfigError(
                f"{source}: {what} must answer a scalar that has a gradient, and scalars as metrics; got a loss of "
                f"shape {tuple(loss.shape)}{'' if loss.requires_grad else ' without a gradient'}, metrics "
                f"{sorted(metrics)}"
            )
        return loss, sums

    return call
