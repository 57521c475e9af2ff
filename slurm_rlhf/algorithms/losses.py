"""Compute the losses other than the policy's, how losses of tokens become one number, and how far policies are apart.

A loss is a sum over the tokens of one micro-batch, divided by one number for the whole optimizer step, over all
micro-batches and data-parallel ranks (`loss_weights`): adding the gradients of all of them gives the exact mean, and
not a mean of means. Metrics are detached sums over actions: add them up over micro-batches and ranks, then divide by
the number of actions of the step.

Values at masked positions reach neither a loss nor a gradient (`packed.actions_only`). A micro-batch without actions
gives a loss of 0 that is still connected to its inputs, so that `backward` runs on it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from slurm_rlhf.algorithms.packed import I64, actions_only, find_actions, masked_sum, step_mean, weighted_sum
from slurm_rlhf.errors import ConfigError, RunError
from slurm_rlhf.records import F32, I32, Bool, Trajectory
from slurm_rlhf.user_files import file_of, line_of, text_of

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8 is still a number in every precision and as a square
MAX_ERROR = 0.2


def approx_kl(logprobs: ArrayLike, ref_logprobs: ArrayLike, estimator: str) -> F32:
    """Estimate KL(policy || reference) per token, [A], from tokens that the policy sampled.

    With r = ref_logprobs - logprobs:  k1 = -r,  k2 = r^2 / 2,  k3 = exp(r) - 1 - r  (r at most 20 in k3, so that one
    token that the reference finds e^100 times likelier does not make the reward infinite). "k3+" is k3: the two have
    different gradients, as a term of the loss (`losses.kl_loss`), and one value.
    logprobs [A], ref_logprobs [A].
    Source: Schulman, Approximating KL Divergence (2020), http://joschu.net/blog/kl-approx.html
    """
    log_ratio = np.asarray(ref_logprobs, dtype=np.float64) - np.asarray(logprobs, dtype=np.float64)
    if estimator == "k1":
        kl = -log_ratio
    elif estimator == "k2":
        kl = log_ratio**2 / 2
    else:
        log_ratio = np.minimum(log_ratio, MAX_LOG_RATIO)
        kl = np.expm1(log_ratio) - log_ratio
    return kl.astype(np.float32)


class KLController:
    """Hold the weight of the KL penalty: fixed (target 0), or steered towards a KL per response.

        coef <- coef * (1 + clip(kl / target - 1, -0.2, 0.2) * min(n / horizon, 1))

    Source: Ziegler et al., Fine-Tuning Language Models from Human Preferences (2019), section 2.2. The `min` is ours:
    without it a batch of more than 5 horizons turns the coefficient negative, which would reward divergence.
    """

    def __init__(self, init_coef: float, target: float = 0.0, horizon: int = 10000) -> None:
        self.coef = float(init_coef)
        self.target = target
        self.horizon = horizon

    def update(self, kl_per_response: float, n: int) -> float:
        """Return the coefficient after a step of n responses with this mean KL, summed over the actions of each.

        Raises RunError when the KL is not a finite number, which would stay in the coefficient for ever.
        """
        if self.target <= 0.0 or n == 0:
            return self.coef
        if not math.isfinite(kl_per_response):
            raise RunError(
                f"the mean KL per response is {kl_per_response}, so algo.kl.target = {self.target} cannot steer the "
                "coefficient: the actor's or the reference's log-probs are not finite. Lower actor.learning_rate, or "
                "resume from an earlier checkpoint."
            )
        error = min(max(kl_per_response / self.target - 1.0, -MAX_ERROR), MAX_ERROR)
        self.coef *= 1.0 + error * min(n / self.horizon, 1.0)
        return self.coef

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs; target and horizon come from the configuration."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved coefficient; a fixed one comes from the configuration, which may change at a resume."""
        if self.target > 0.0:
            self.coef = float(state["coef"])


def ages(trajectories: list[Trajectory], version: int) -> I32:
    """Count the updates between the policy that sampled a token and policy `version`, [A], as `records.pack` orders."""
    lengths = [len(trajectory.response_ids) for trajectory in trajectories]
    found = np.zeros(sum(lengths), dtype=np.int32)
    ends = itertools.accumulate(lengths)
    for trajectory, length, end in zip(trajectories, lengths, ends, strict=True):
        for span in trajectory.versions:
            if span.version != version:
                found[end - length : end][span.start : span.end] = version - span.version
    return found


def staleness(trajectories: list[Trajectory], age: I32, mask: Bool) -> dict[str, float]:
    """Compute the metrics of a batch that several policies may have sampled.

    stale_tokens: share of the tokens that an older policy than the actor's sampled; staleness_max: the age of the
    oldest; mixed_responses: share of the responses with tokens of several policies. age, mask [A].
    """
    stale = mask & (age > 0)
    several = [len({span.version for span in trajectory.versions}) > 1 for trajectory in trajectories]
    return {
        "stale_tokens": float(stale.sum() / max(mask.sum(), 1)),
        "staleness_max": float(age[mask].max(initial=0)),
        "mixed_responses": float(np.mean(several)) if several else 0.0,
    }


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
    mean = step_mean(weighted_sum(clean, weights, action_mask), denominator)
    return -coef * mean, {"entropy": masked_sum(clean, action_mask).detach()}


def kl_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    action_mask: Tensor,
    denominator: float,
    weights: Tensor,
    estimator: str,
) -> tuple[Tensor, Metrics]:
    """Compute the weighted KL divergence of the policy from the reference, a scalar to add to the policy loss.

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
    total = weighted_sum(kl, weights, action_mask)
    return step_mean(total, denominator), {"kl_loss": masked_sum(kl.detach(), action_mask)}


def k3(log_ratio: Tensor) -> Tensor:
    """Estimate KL(p || q) per element as exp(r) - 1 - r, which is never negative, for r = log(q / p) at samples of p.

    r is clamped at 20 before exp and not after: clamping the result leaves 0 * inf = NaN as its gradient.
    Source: as `approx_kl`.
    """
    log_ratio = log_ratio.clamp(max=MAX_LOG_RATIO)
    return log_ratio.expm1() - log_ratio


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
    mean = -weighted_sum(actions_only(logprobs, action_mask), weights, action_mask)
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
    """Divide `_seq_mean_token_sum` by the longest length of a response. Source: Dr. GRPO (2025), arXiv 2503.20783."""
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
    """Weight the actions of responses with a positive reward by 1 / their number, [A]; all others by 0.

    rewards [N], action_mask [A], offsets [N + 1] of the whole step over all ranks.
    """
    chosen = np.repeat(np.asarray(rewards) > 0, np.diff(offsets)) & action_mask
    return chosen.astype(np.float32) / np.float32(max(chosen.sum(), 1))


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
    sapo_temperatures: tuple[float, float] = (1.0, 1.05)  # temperature for advantages above 0, and for the others


PolicyLoss = Callable[[PolicyInputs], tuple["Tensor", Metrics]]
"""Inputs -> (loss, a scalar with gradient; detached sums over the actions by name)."""


@dataclass(frozen=True, slots=True)
class Ratios:
    """Hold the columns of a micro-batch from which losses are computed, [A] each, zero at masked positions."""

    logprobs: Tensor  # new log-probs, with gradient
    advantages: Tensor
    log_ratio: Tensor  # log pi / pi_old, within +-20, with gradient where it was not clamped

    @classmethod
    def of(cls, inputs: PolicyInputs) -> Ratios:
        """Compute the ratios, clamped so that exp does not overflow: beyond +-20 a token gives no gradient."""
        mask = inputs.action_mask
        new, old = actions_only(inputs.logprobs, mask), actions_only(inputs.old_logprobs, mask)
        advantages = actions_only(inputs.advantages, mask)
        return cls(new, advantages, (new - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def aggregated(
    inputs: PolicyInputs, losses: Tensor, log_ratio: Tensor, ratio: Tensor, clipped: Tensor | None
) -> tuple[Tensor, Metrics]:
    """Weight and add up the losses [A] of a micro-batch, and divide by the denominator of the whole optimizer step.

    Metrics, sums over actions without the weights: policy_loss; ratio, as it enters the loss; approx_kl (k3 of old
    against new policy); clip_fraction of `clipped` (bool [A]: tokens whose gradient is cut off; None: no such metric).
    """
    mask = inputs.action_mask
    metrics = {"policy_loss": masked_sum(losses, mask).detach(), "ratio": masked_sum(ratio.detach(), mask)}
    if clipped is not None:
        metrics["clip_fraction"] = masked_sum(clipped.to(ratio.dtype), mask)
    metrics["approx_kl"] = masked_sum(k3(log_ratio.detach()), mask)
    return step_mean(weighted_sum(losses, inputs.weights, mask), inputs.denominator), metrics


def checked_loss(name: str, function: PolicyLoss) -> PolicyLoss:
    """Guard the policy loss of algorithm `name`: errors name its file and line and say what to do.

    The guarded loss raises ConfigError when `function` raises, or returns anything but (scalar with gradient, metrics).
    """
    source, what = file_of(function), f"the policy loss of algorithm {name!r}"

    def call(inputs: PolicyInputs) -> tuple[Tensor, Metrics]:
        try:
            loss, metrics = function(inputs)
            scalar = loss.dim() == 0 and loss.requires_grad
            sums = {key: value.detach() for key, value in metrics.items() if value.dim() == 0}
        except Exception as error:
            raise ConfigError(
                f"{line_of(source, error)}: {what} raised {text_of(error)}. It has to return the loss, and a dict of "
                "sums over the actions, all of them tensors"
            ) from error
        if not scalar or len(sums) < len(metrics):
            raise ConfigError(
                f"{source}: {what} must return a scalar that has a gradient, and scalars as metrics; got a loss of "
                f"shape {tuple(loss.shape)}{'' if loss.requires_grad else ' without a gradient'}, metrics "
                f"{sorted(metrics)}"
            )
        return loss, sums

    return call
