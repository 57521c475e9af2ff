"""The losses of the policy, by `actor.policy_loss_type`, and how far policies are apart: KL, and the age of samples.

The losses call methods of tensors and import no torch. `losses.PolicyInputs` says what they may look at.

To add a loss: a function with formula and source, its record in the table, its name in `config/schema_models.py`. The
tests in `tests/algorithms/test_policy_losses.py` walk the table.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from slurm_rlhf.algorithms.losses import Metrics, PolicyInputs, PolicyLoss, Ratios, aggregated
from slurm_rlhf.algorithms.packed import actions_only
from slurm_rlhf.errors import RunError
from slurm_rlhf.records import F32, I32, Bool, Trajectory

if TYPE_CHECKING:
    from torch import Tensor


def ppo_loss(inputs: PolicyInputs) -> tuple[Tensor, Metrics]:
    """Compute PPO's clipped surrogate, a scalar: the loss of an algorithm that brings none of its own.

        ratio = exp(logprobs - old_logprobs)
        sum over actions of  -w min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)  / denominator

    With dual_clip c, where A < 0:  -w max(min(...), c * A), which bounds the loss of a token that became much likelier.
    The log-ratio is clamped to +-20, so that exp does not overflow; beyond it a token gives no gradient.
    Metrics: policy_loss, ratio, clip_fraction (actions where the clipped term is the smaller one, or c binds),
    approx_kl (k3 of old against new policy).
    Sources: Schulman et al., Proximal Policy Optimization (2017), eq. 7; two ranges: Yu et al., DAPO (2025), eq. 10;
    dual clip: Ye et al., Mastering Complex Control in MOBA Games (2020), arXiv 1912.09729, eq. 5.
    """
    ratios = Ratios.of(inputs)
    ratio = ratios.log_ratio.exp()
    return aggregated(inputs, *_surrogate(inputs, ratio, ratios.advantages, ratios.log_ratio))


def gspo_loss(inputs: PolicyInputs) -> tuple[Tensor, Metrics]:
    """Compute the clipped surrogate of the ratio of whole responses, a scalar.

        s_i = exp(mean over the actions t of response i of  logprobs - old_logprobs)
        s_it = sg(s_i) * exp(logprobs_t - sg(logprobs_t))
        sum over actions of  -w min(s_it * A_t, clip(s_it, 1 - clip_low, 1 + clip_high) * A_t)  / denominator

    sg stops the gradient; s_it has the value of s_i, and its gradient is that of the token alone. So advantages may
    differ within a response, and where they do not, and the aggregation is seq-mean-token-mean, this is the mean over
    responses of -min(s_i A_i, clip(s_i) A_i). The mean log-ratio is clamped to +-20, as in `ppo_loss`; dual_clip too.
    Metrics as in `ppo_loss`; ratio is s_i at each action, approx_kl that of the tokens.
    Source: Zheng et al., Group Sequence Policy Optimization (2025), arXiv 2507.18071, eq. 5, 7 and GSPO-token, eq. 13.
    """
    ratios, mask = Ratios.of(inputs), inputs.action_mask
    new, old = ratios.logprobs.detach(), actions_only(inputs.old_logprobs, mask)
    mean = _response_means((new - old).detach(), mask, inputs.response_lens)
    sequence = mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    own = (ratios.logprobs - new).where(mean.abs() <= MAX_LOG_RATIO, 0).exp()
    return aggregated(inputs, *_surrogate(inputs, sequence * own, ratios.advantages, ratios.log_ratio))


def _surrogate(
    inputs: PolicyInputs, ratio: Tensor, advantages: Tensor, log_ratio: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Clip the surrogate; answers what `aggregated` takes: losses, log-ratio, ratio, and which were clipped."""
    plain = ratio * advantages
    clipped = ratio.clamp(1.0 - inputs.clip_low, 1.0 + inputs.clip_high) * advantages
    gain, cut = plain.minimum(clipped), clipped < plain
    if inputs.dual_clip:
        floor = inputs.dual_clip * advantages
        bounded = (advantages < 0) & (gain < floor)
        gain, cut = floor.where(bounded, gain), cut | bounded
    return -gain, log_ratio, ratio, cut


def _response_means(x: Tensor, mask: Tensor, lens: list[int]) -> Tensor:
    """Give each token the mean of x [A] over the actions of its response, [A]; 0 where a response has none."""
    counts = mask.to(x.dtype).split(lens)
    means = [part.sum() / count.sum().clamp(min=1) for part, count in zip(x.split(lens), counts, strict=True)]
    result = x.new_zeros(x.shape)
    for place, mean in zip(result.split(lens), means, strict=True):
        place.fill_(mean)
    return result


def cispo_loss(inputs: PolicyInputs) -> tuple[Tensor, Metrics]:
    """Compute REINFORCE with a clipped importance weight, a scalar: no token loses its gradient.

        sum over actions of  -w sg(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * logprobs  / denominator

    sg stops the gradient. clip_high is a distance from 1, as in the paper: 4 caps the weight at 5, which is written 5
    where the number is the cap itself (TRL). clip_low of 1 or more: no bound below.
    Metrics: policy_loss, ratio, clip_fraction (actions whose weight was clipped; they still learn), approx_kl.
    Source: MiniMax-M1 (2025), arXiv 2506.13585, eq. 4 and 5.
    """
    ratios = Ratios.of(inputs)
    ratio = ratios.log_ratio.detach().exp()
    weight = ratio.clamp(1.0 - inputs.clip_low, 1.0 + inputs.clip_high)
    losses = -weight * ratios.advantages * ratios.logprobs
    return aggregated(inputs, losses, ratios.log_ratio, ratio, weight != ratio)


def sapo_loss(inputs: PolicyInputs) -> tuple[Tensor, Metrics]:
    """Compute the surrogate with a soft gate in place of a clip range, a scalar.

        sum over actions of  -w (4 / tau) sigmoid(tau * (ratio - 1)) * A  / denominator

    tau is the first of sapo_temperatures where A > 0, else the second. At ratio 1 the gradient is that of ratio * A;
    it fades the faster, the larger tau. The log-ratio is clamped to +-20.
    Metrics: policy_loss, ratio, approx_kl.
    Source: Gao et al., Soft Adaptive Policy Optimization (2025), arXiv 2511.20347, eq. 5 and 6.
    """
    ratios, (above, below) = Ratios.of(inputs), inputs.sapo_temperatures
    ratio, advantages = ratios.log_ratio.exp(), ratios.advantages
    tau = advantages.new_full(advantages.shape, above).where(advantages > 0, below)
    losses = -(4.0 / tau) * (tau * (ratio - 1.0)).sigmoid() * advantages
    return aggregated(inputs, losses, ratios.log_ratio, ratio, None)


def dppo_tv_loss(inputs: PolicyInputs) -> tuple[Tensor, Metrics]:
    """Compute the surrogate of the tokens whose probability moved little, a scalar.

        keep = p - p_old <= clip_high  where A > 0,  p - p_old >= -clip_low  else
        sum over kept actions of  -w ratio * A  / denominator

    p = exp(logprobs), without gradient. The range is of probabilities and not of their ratio: a rare token may move by
    a large ratio, a likely one not. A token that comes back, so that its update would undo the move, is kept. The
    log-ratio is clamped to +-20; beyond it a token gives no gradient.
    Metrics: policy_loss, ratio, clip_fraction (actions that were dropped), approx_kl.
    Source: Qi et al., Rethinking the Trust Region in LLM Reinforcement Learning (2026), arXiv 2602.04879, DPPO with the
    binary total variation.
    """
    ratios, mask = Ratios.of(inputs), inputs.action_mask
    ratio, advantages = ratios.log_ratio.exp(), ratios.advantages
    moved = ratios.logprobs.detach().exp() - actions_only(inputs.old_logprobs, mask).exp()
    dropped = ((advantages > 0) & (moved > inputs.clip_high)) | ((advantages < 0) & (moved < -inputs.clip_low))
    losses = (-ratio * advantages).where(~dropped, 0)
    return aggregated(inputs, losses, ratios.log_ratio, ratio, dropped)


LOW_HIGH, DUAL_CLIP = "eps_clip_low_high", "dual_clip"


@dataclass(frozen=True, slots=True)
class PolicyLossRecord:
    """Describe a policy loss."""

    name: str
    """The value of `actor.policy_loss_type` that chooses it."""
    function: PolicyLoss
    keys: tuple[str, ...]
    """Keys of the group actor that it depends on; any other loss's key has no effect with it."""
    clip_range: tuple[float, float] | None = None
    """Below and above, where eps_clip_low_high is empty; None: eps_clip on both sides."""
    aggregation: str = ""
    """A name in `losses.AGGREGATIONS`; empty: what the algorithm says."""


_ROWS = (
    PolicyLossRecord("ppo", ppo_loss, ("eps_clip", LOW_HIGH, DUAL_CLIP)),
    # Section 5.1 of the paper.
    PolicyLossRecord("gspo", gspo_loss, (LOW_HIGH, DUAL_CLIP), (3e-4, 4e-4), "seq-mean-token-mean"),
    # The paper has no bound below and names none above. A weight of at most 5: TRL's recommendation, which it takes
    # from Khatri et al., The Art of Scaling Reinforcement Learning Compute (2025), arXiv 2510.13786.
    PolicyLossRecord("cispo", cispo_loss, (LOW_HIGH,), (1.0, 4.0)),
    PolicyLossRecord(
        "sapo", sapo_loss, ("sapo_temperature_pos", "sapo_temperature_neg"), aggregation="seq-mean-token-mean"
    ),
    PolicyLossRecord("dppo_tv", dppo_tv_loss, (LOW_HIGH,), (0.2, 0.2)),
)

POLICY_LOSSES: dict[str, PolicyLossRecord] = {row.name: row for row in _ROWS}


def clip_range(loss_type: str, low_high: Sequence[float], both: float) -> tuple[float, float]:
    """Choose how far below and above 1 (dppo_tv: a probability) a policy may move: the keys' values, else the usual."""
    if low_high:
        return low_high[0], low_high[1]
    return POLICY_LOSSES[loss_type].clip_range or (both, both)


def aggregation_of(mode: str, loss_type: str, usual: str) -> str:
    """Choose how losses of tokens become one number: `actor.loss_agg_mode`, else the loss, else `usual`, the algorithm.

    All are names in `losses.AGGREGATIONS`; `mode` may be empty.
    """
    return mode or POLICY_LOSSES[loss_type].aggregation or usual


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
        """Restore a saved coefficient; a fixed one stays that of the configuration, to be changed over a resume."""
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
