"""Compute the losses other than the policy's, and how the losses of tokens become one number.

A loss is a sum over the tokens of one micro-batch, divided by one number for the whole optimizer step, over all
micro-batches and data-parallel ranks (`loss_weights`): adding the gradients of all of them gives the exact mean, and
not a mean of means. Metrics are detached sums over actions: add them up over micro-batches and ranks, then divide by
the number of actions of the step.

What stands at masked positions reaches nothing (`masked`). A micro-batch without actions gives a loss of 0 that is
still connected to its inputs, so that `backward` runs on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from slurm_rlhf.algorithms.packed import I64, actions_only, find_actions, masked_sum, step_mean, weighed_sum
from slurm_rlhf.algorithms.policy_loss_inputs import Metrics, k3
from slurm_rlhf.records import F32, Bool

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


def kl_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    action_mask: Tensor,
    denominator: float,
    weights: Tensor,
    estimator: str,
) -> tuple[Tensor, Metrics]:
    """Compute the weighed KL divergence of the policy from the reference, a scalar to add to the policy loss.

        sum over actions of  w kl  / denominator,  with r = ref_logprobs - logprobs:
        k2   r^2 / 2
        k3   exp(r) - 1 - r                  k3+  the value of k3, the gradient of k2

    logprobs [A] (with gradient), ref_logprobs [A], weights [A]: of the aggregation, times the coefficient. On tokens
    that the policy sampled, the mean gradient of k2 is that of KL(policy || reference); that of k3 belongs to
    KL(reference || policy); that of k1 = -r is zero, so that k1 is no loss. r is at most 20 in k3.
    Metrics: kl_loss, the sum without weights. Sources: Schulman, Approximating KL Divergence (2020); Tang and Munos, On
    a Few Pitfalls in KL Divergence Gradient Estimation for RL (2025), arXiv 2506.09477; "k3+" as in verl.
    """
    log_ratio = actions_only(ref_logprobs, action_mask) - actions_only(logprobs, action_mask)
    kl = KL_LOSSES[estimator](log_ratio)
    total = weighed_sum(kl, weights, action_mask)
    return step_mean(total, denominator), {"kl_loss": masked_sum(kl.detach(), action_mask)}


def _k2(log_ratio: Tensor) -> Tensor:
    return log_ratio**2 / 2


def _k3_by_k2(log_ratio: Tensor) -> Tensor:
    slope = _k2(log_ratio)
    return slope - slope.detach() + k3(log_ratio).detach()


KL_LOSSES: dict[str, Callable[[Tensor], Tensor]] = {"k2": _k2, "k3": k3, "k3+": _k3_by_k2}
"""`algo.kl.estimator` -> KL per element of log(reference / policy), with the gradient that the estimator has."""


def nll_loss(logprobs: Tensor, action_mask: Tensor, weights: Tensor, coef: float) -> tuple[Tensor, Metrics]:
    """Compute coef times the mean negative log-likelihood of the responses that were good, a scalar to add.

        -coef * sum over actions of  w logprobs

    logprobs [A] (with gradient); weights [A]: 1 / their number at the actions of responses with a positive reward, in
    the whole optimizer step, else 0. Metrics: nll_loss, without coef; it adds up to the mean and is divided by nothing.
    Source: Yue et al., VAPO (2025), arXiv 2504.05118, there the language model loss of positive examples.
    """
    mean = -weighed_sum(actions_only(logprobs, action_mask), weights, action_mask)
    return coef * mean, {"nll_loss": mean.detach()}


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


def positive_weights(rewards: F32, action_mask: Bool, offsets: NDArray[Any]) -> F32:
    """Weigh the actions of responses with a positive reward by 1 / their number, [A]; all others by 0.

    rewards [N], action_mask [A], offsets [N + 1] of the whole step over all ranks.
    """
    chosen = np.repeat(np.asarray(rewards) > 0, np.diff(offsets)) & action_mask
    return chosen.astype(np.float32) / np.float32(max(chosen.sum(), 1))
