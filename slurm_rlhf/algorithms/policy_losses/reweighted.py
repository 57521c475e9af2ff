"""Losses that weigh the gradient of each token by how far it has moved: CISPO, SAPO, DPPO."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurm_rlhf.algorithms.packed import actions_only
from slurm_rlhf.algorithms.policy_losses.inputs import Metrics, PolicyInputs, Ratios, aggregated

if TYPE_CHECKING:
    from torch import Tensor


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
