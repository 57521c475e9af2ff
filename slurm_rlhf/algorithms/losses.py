"""PPO's losses on packed tokens: sums over the tokens of one micro-batch, divided by one number for the whole step.

`denominator` is the number of actions in the whole optimizer step, over all micro-batches and data-parallel ranks, so
that adding the gradients of all of them gives the exact mean over tokens and not a mean of means. Metrics are detached
sums over actions: add them up over micro-batches and ranks, then divide by the same denominator.

Every argument named `...mask` is bool [A]. What stands at masked positions, NaN included, reaches neither a loss nor a
gradient: it is replaced before anything is computed from it, since multiplying by zero would keep the NaN. A
micro-batch without actions gives a loss of 0 that is still connected to its inputs, so that `backward` runs on it.
Half precision inputs are computed in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slurm_rlhf.algorithms.kl import MAX_LOG_RATIO

Metrics = dict[str, Tensor]


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    action_mask: Tensor,
    denominator: float,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Metrics]:
    """PPO's clipped surrogate, a scalar.

        ratio = exp(logprobs - old_logprobs)
        sum over actions of  -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)  / denominator

    logprobs [A] (with gradient), old_logprobs [A], advantages [A]. The log-ratio is clamped to +-20, so that exp does
    not overflow; beyond it a token gives no gradient.
    Metrics: policy_loss, ratio, clip_fraction (actions where the clipped term is the smaller one), approx_kl (k3 of
    old against new policy).
    Source: Schulman et al., Proximal Policy Optimization (2017), eq. 7; two ranges: Yu et al., DAPO (2025), eq. 10.
    """
    new, old = _actions_only(logprobs, action_mask), _actions_only(old_logprobs, action_mask)
    advantage = _actions_only(advantages, action_mask)
    log_ratio = (new - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    plain = ratio * advantage
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantage
    total = _sum(-torch.minimum(plain, clipped), action_mask)
    with torch.no_grad():
        metrics = {
            "policy_loss": total.detach(),
            "ratio": _sum(ratio, action_mask),
            "clip_fraction": _sum((clipped < plain).to(ratio.dtype), action_mask),
            "approx_kl": _sum(k3(log_ratio), action_mask),
        }
    return _mean(total, denominator), metrics


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    action_mask: Tensor,
    denominator: float,
    value_clip: float,
) -> tuple[Tensor, Metrics]:
    """Half the squared error of the value model, a scalar.

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
    total = _sum(torch.maximum(plain, clipped), action_mask) / 2
    # Within the clip range the two terms differ by rounding alone.
    effective = (clipped > plain) & ((value - old).abs() > value_clip)
    metrics = {
        "value_loss": total.detach(),
        "value_clip_fraction": _sum(effective.to(value.dtype), action_mask),
    }
    return _mean(total, denominator), metrics


def entropy_bonus(entropy: Tensor, action_mask: Tensor, denominator: float, coef: float) -> tuple[Tensor, Metrics]:
    """-coef times the mean entropy of the policy at its actions, a scalar to add to the policy loss.

    entropy [A] in nats, at the temperature that the log-probs were taken at. Metrics: entropy.
    """
    total = _sum(_actions_only(entropy, action_mask), action_mask)
    return -coef * _mean(total, denominator), {"entropy": total.detach()}


def k3(log_ratio: Tensor) -> Tensor:
    """exp(r) - 1 - r per element, for r = log(q / p) at samples of p: an estimate of KL(p || q) that is never negative.

    r is clamped at 20 before exp and not after: clamping the result leaves 0 * inf = NaN as its gradient.
    Source: as `kl.approx_kl`.
    """
    log_ratio = log_ratio.clamp(max=MAX_LOG_RATIO)
    return log_ratio.expm1() - log_ratio


def _actions_only(x: Tensor, mask: Tensor) -> Tensor:
    """x in at least fp32, with zeros at masked positions."""
    if x.shape != mask.shape:
        raise ValueError(f"a tensor of shape {tuple(x.shape)} for an action mask of shape {tuple(mask.shape)}")
    return torch.where(mask, x, 0).to(torch.promote_types(x.dtype, torch.float32))


def _sum(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, x, 0).sum()


def _mean(total: Tensor, denominator: float) -> Tensor:
    """The denominator is a count: a step without any action has loss 0, not 0 / 0."""
    return total / max(denominator, 1.0)
