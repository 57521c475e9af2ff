"""Compute losses on packed tokens: sums over the tokens of one micro-batch, divided by one number for the whole step.

`denominator` is the number of actions in the whole optimizer step, over all micro-batches and data-parallel ranks, so
that adding the gradients of all of them gives the exact mean over tokens and not a mean of means. Metrics are detached
sums over actions: add them up over micro-batches and ranks, then divide by the same denominator.

Every argument named `...mask` is bool [A]. What stands at masked positions, NaN included, reaches neither a loss nor a
gradient: it is replaced before anything is computed from it, since multiplying by zero would keep the NaN. A
micro-batch without actions gives a loss of 0 that is still connected to its inputs, so that `backward` runs on it.
Half precision inputs are computed in fp32.

An aggregation weighs the losses of single tokens: it gives one weight per token and that denominator, both computed
from the whole optimizer step, so a step does not depend on how it is cut into micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from slurm_rlhf.algorithms.packed import I64, find_actions
from slurm_rlhf.algorithms.policy_distance import MAX_LOG_RATIO
from slurm_rlhf.errors import ConfigError
from slurm_rlhf.records import F32, Bool
from slurm_rlhf.user_files import file_of, line_of, text_of

if TYPE_CHECKING:  # losses call methods of tensors only, so that this room needs no torch
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
    weights: Tensor | None  # [A], of the aggregation; None: 1 for every action
    denominator: float
    clip_low: float
    clip_high: float


PolicyLoss = Callable[[PolicyInputs], tuple["Tensor", Metrics]]
"""Inputs -> (loss, a scalar with gradient; detached sums over the actions by name)."""


def checked_loss(name: str, function: PolicyLoss) -> PolicyLoss:
    """Guard the policy loss of algorithm `name`: what is wrong with it is told with its file, line and what to do.

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


def ppo_loss(inputs: PolicyInputs) -> tuple[Tensor, Metrics]:
    """Compute PPO's clipped surrogate, a scalar: the loss of an algorithm that brings none of its own.

        ratio = exp(logprobs - old_logprobs)
        sum over actions of  -w min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)  / denominator

    The log-ratio is clamped to +-20, so that exp does not overflow; beyond it a token gives no gradient.
    Metrics: policy_loss, ratio, clip_fraction (actions where the clipped term is the smaller one), approx_kl (k3 of
    old against new policy).
    Source: Schulman et al., Proximal Policy Optimization (2017), eq. 7; two ranges: Yu et al., DAPO (2025), eq. 10.
    """
    action_mask = inputs.action_mask
    new, old = _actions_only(inputs.logprobs, action_mask), _actions_only(inputs.old_logprobs, action_mask)
    advantage = _actions_only(inputs.advantages, action_mask)
    log_ratio = (new - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    plain = ratio * advantage
    clipped = ratio.clamp(1.0 - inputs.clip_low, 1.0 + inputs.clip_high) * advantage
    losses = -plain.minimum(clipped)
    total = _sum(losses, action_mask)
    metrics = {
        "policy_loss": total.detach(),
        "ratio": _sum(ratio.detach(), action_mask),
        "clip_fraction": _sum((clipped < plain).to(ratio.dtype), action_mask),
        "approx_kl": _sum(k3(log_ratio.detach()), action_mask),
    }
    if inputs.weights is not None:
        total = _sum(losses * inputs.weights, action_mask)
    return _mean(total, inputs.denominator), metrics


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
    value, old = _actions_only(values, action_mask), _actions_only(old_values, action_mask)
    target = _actions_only(returns, action_mask)
    plain = (value - target) ** 2
    clipped = plain
    if value_clip > 0:
        clipped = (old + (value - old).clamp(-value_clip, value_clip) - target) ** 2
    total = _sum(plain.maximum(clipped), action_mask) / 2
    # Within the clip range the two terms differ by rounding alone.
    effective = (clipped > plain) & ((value - old).abs() > value_clip)
    metrics = {
        "value_loss": total.detach(),
        "value_clip_fraction": _sum(effective.to(value.dtype), action_mask),
    }
    return _mean(total, denominator), metrics


def entropy_bonus(entropy: Tensor, action_mask: Tensor, denominator: float, coef: float) -> tuple[Tensor, Metrics]:
    """Compute -coef times the mean entropy of the policy at its actions, a scalar to add to the policy loss.

    entropy [A] in nats, at the temperature that the log-probs were taken at. Metrics: entropy.
    """
    total = _sum(_actions_only(entropy, action_mask), action_mask)
    return -coef * _mean(total, denominator), {"entropy": total.detach()}


def k3(log_ratio: Tensor) -> Tensor:
    """Estimate KL(p || q) per element as exp(r) - 1 - r, which is never negative, for r = log(q / p) at samples of p.

    r is clamped at 20 before exp and not after: clamping the result leaves 0 * inf = NaN as its gradient.
    Source: as `policy_distance.approx_kl`.
    """
    log_ratio = log_ratio.clamp(max=MAX_LOG_RATIO)
    return log_ratio.expm1() - log_ratio


def _actions_only(x: Tensor, mask: Tensor) -> Tensor:
    """Return x in at least fp32, with zeros at masked positions."""
    if x.shape != mask.shape:
        raise ValueError(f"a tensor of shape {tuple(x.shape)} for an action mask of shape {tuple(mask.shape)}")
    x = x.where(mask, 0)
    return x.float() if x.dtype.itemsize < 4 else x


def _sum(x: Tensor, mask: Tensor) -> Tensor:
    return x.where(mask, 0).sum()


def _mean(total: Tensor, denominator: float) -> Tensor:
    """Divide by a count: a step without any action has loss 0, not 0 / 0."""
    return total / max(denominator, 1.0)


Weights = tuple[float, F32 | None]
"""(denominator, weight of each token [A]; None: 1 for every action)."""


def _token_mean(counts: I64, longest: int) -> tuple[float, NDArray[Any] | None]:
    """Take the mean over all actions of the step. Source: Yu et al., DAPO (2025), arXiv 2503.14476."""
    return float(counts.sum()), None


def _seq_mean_token_mean(counts: I64, longest: int) -> tuple[float, NDArray[Any] | None]:
    """Take the mean over responses of the mean over their actions. Source: Shao et al., DeepSeekMath (2024), eq. 3."""
    return float((counts > 0).sum()), 1.0 / np.maximum(counts, 1)


def _seq_mean_token_sum(counts: I64, longest: int) -> tuple[float, NDArray[Any] | None]:
    """Take the mean over responses of the sum over their actions."""
    return float((counts > 0).sum()), None


def _seq_mean_token_sum_norm(counts: I64, longest: int) -> tuple[float, NDArray[Any] | None]:
    """Divide that by the longest length a response may have. Source: Liu et al., Dr. GRPO (2025), arXiv 2503.20783."""
    return float((counts > 0).sum()) * longest, None


AGGREGATIONS: dict[str, Callable[[I64, int], tuple[float, NDArray[Any] | None]]] = {
    "token-mean": _token_mean,
    "seq-mean-token-mean": _seq_mean_token_mean,
    "seq-mean-token-sum": _seq_mean_token_sum,
    "seq-mean-token-sum-norm": _seq_mean_token_sum_norm,
}
"""Name -> (actions of each response [N], longest length) -> (denominator, weight of each response [N] or None)."""


def loss_weights(mode: str, action_mask: Bool, offsets: NDArray[Any], longest: int) -> Weights:
    """Find denominator and token weights of an optimizer step; a response without actions counts nowhere.

    action_mask [A], offsets [N + 1] of the whole step over all ranks; longest: rollout.max_new_tokens.
    """
    counts = find_actions(action_mask, offsets).counts
    denominator, weights = AGGREGATIONS[mode](counts, longest)
    if weights is None:
        return denominator, None
    return denominator, np.repeat(weights, np.diff(offsets)).astype(np.float32)
