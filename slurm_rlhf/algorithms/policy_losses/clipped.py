"""Losses that stop learning from a token, or a response, once its ratio has left a range: PPO, dual clip, GSPO."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurm_rlhf.algorithms.packed import actions_only
from slurm_rlhf.algorithms.policy_distance import MAX_LOG_RATIO
from slurm_rlhf.algorithms.policy_losses.inputs import Metrics, PolicyInputs, Ratios, aggregated

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
