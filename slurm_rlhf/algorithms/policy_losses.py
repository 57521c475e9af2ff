"""The losses of the policy: functions of one micro-batch, and the table from which `actor.policy_loss_type` chooses.

All of them call methods of tensors and import no torch. `losses.PolicyInputs` says what they may look at.

To add one: a function with formula and source, its record in the table, its name in `config/schema_models.py`. The
tests in `tests/algorithms/test_policy_losses.py` walk the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slurm_rlhf.algorithms.losses import MAX_LOG_RATIO, Metrics, PolicyInputs, PolicyLoss, Ratios, aggregated
from slurm_rlhf.algorithms.packed import actions_only

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
    """Clip the surrogate; return the arguments of `aggregated`: losses, log-ratio, ratio, and which were clipped."""
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

    sg stops the gradient. clip_high is a distance from 1, as in the paper: 4 caps the weight at 5. (TRL's epsilon_high
    is the cap itself, 5.) clip_low of 1 or more: no bound below.
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
    away from 1 it fades, the faster the larger tau is. The log-ratio is clamped to +-20.
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
    a large ratio, a likely one not. A token whose update would undo its move is kept. The log-ratio is clamped to
    +-20; beyond it a token gives no gradient.
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
    """Keys of the group actor that it depends on; the keys of the other losses have no effect with it."""
    clip_range: tuple[float, float] | None = None
    """Default of actor.eps_clip_low_high; None: actor.eps_clip on both sides."""
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
    """Choose the clip range below and above 1 (dppo_tv: of a probability): `low_high`, the loss's own, or `both`."""
    if low_high:
        return low_high[0], low_high[1]
    return POLICY_LOSSES[loss_type].clip_range or (both, both)


def aggregation_of(mode: str, loss_type: str, usual: str) -> str:
    """Choose how losses of tokens become one number: `mode` (actor.loss_agg_mode), or the loss's way, or `usual`.

    `usual` is the algorithm's way. All are names in `losses.AGGREGATIONS`; `mode` may be empty.
    """
    return mode or POLICY_LOSSES[loss_type].aggregation or usual
