"""Correct for the distance between the policy that sampled a token and the one that the update starts from.

    rho_t = exp(logprobs_t - rollout_logprobs_t)

logprobs: the actor's at the beginning of the step. rollout_logprobs: the engine's, by the version that sampled the
token. So rho measures how differently the two programs compute, and with vllm.sync_mode = inflight also the updates in
between. The loss of a token is weighted by a bounded function of rho; its clipped ratio covers the update alone.
Sources: Hilton et al., Batch size-invariance for policy optimization (2022), arXiv 2110.00641: the proximal policy is
not the one that sampled; Yao et al., Your Efficient RL Framework Secretly Brings You Off-Policy RL Training (2025).

The denominator of the loss still counts all actions of the optimizer step, dropped ones included: the weights are
importance weights of a sum over samples, and a smaller denominator would raise the others in place of the dropped ones.

Shapes as in `packed`: A tokens of N responses, C of them actions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slurm_rlhf.algorithms.losses import MAX_LOG_RATIO
from slurm_rlhf.algorithms.packed import F64, I64, find_actions
from slurm_rlhf.algorithms.registry import CorrectionRule
from slurm_rlhf.records import F32, I32, Bool, Experience

Metrics = dict[str, float]

COLUMN = "correction"
"""The column of an Experience that holds the weights; absent: every weight is 1."""


@dataclass(slots=True)
class _Ratios:
    """Hold the ratios at the actions of a batch."""

    log_rho: F64  # [C], unbounded
    rho: F64  # [C], bounded
    owner: I64  # [C], response of each action
    counts: I64  # [N], actions of each response

    def response_means(self, column: F64) -> F64:
        """Average a column [C] over the actions of each response, [N]; 0 without actions."""
        return self.response_sums(column) / np.maximum(self.counts, 1)

    def response_sums(self, column: F64) -> F64:
        """Add up a column [C] over the actions of each response, [N]."""
        return np.bincount(self.owner, column, len(self.counts)).astype(np.float64)


def mask_not_finite(experience: Experience) -> int:
    """Remove actions from the action mask whose log-prob by the engine is NaN or infinite; return how many.

    Without it there is no ratio, so nothing is trained on them.
    """
    lost = experience.action_mask & ~np.isfinite(experience.columns["rollout_logprobs"])
    experience.action_mask = experience.action_mask & ~lost
    return int(lost.sum())


def correct(
    rule: CorrectionRule | None, off_policy_delta: float, experience: Experience, age: I32
) -> tuple[F32 | None, Metrics]:
    """Compute the weight of each token's loss, [A], and measure how far engine and actor are apart.

    Reads the columns logprobs (the actor's at the beginning of the step), rollout_logprobs (finite at actions, by
    `mask_not_finite`) and advantages. age [A]: updates between the version that sampled a token and the actor's.
    The weights are None without a rule and without `off_policy_delta`, and 0 at masked positions. Ratios are bounded by
    exp(+-20), and dropped tokens are set to 0, not multiplied by 0, which would turn an overflow into NaN.
    Metrics: see `_describe`; also for each age, as `correction/age_<updates>/...`, where a token is stale.
    Raises ValueError where lengths disagree.
    """
    columns = {name: experience.columns[name] for name in ("logprobs", "rollout_logprobs", "advantages")}
    actions = find_actions(experience.action_mask, experience.action_offsets, **columns, age=age)
    at, counts = actions.positions, actions.counts
    log_rho = np.subtract(columns["logprobs"][at], columns["rollout_logprobs"][at], dtype=np.float64)
    ratios = _Ratios(log_rho, _bounded_exp(log_rho), np.repeat(np.arange(len(counts)), counts), counts)
    weights, truncated, dropped = np.ones_like(log_rho), np.zeros(len(at), np.bool_), np.zeros(len(at), np.bool_)
    if rule is not None:
        weights, truncated, dropped = _weigh(rule, ratios)
    if off_policy_delta:
        dropped = dropped | _off_policy(ratios, columns["advantages"][at], off_policy_delta)
    metrics = _measure(ratios, truncated & ~dropped, dropped, age[at])
    if rule is None and not off_policy_delta:
        return None, metrics
    column = np.zeros(len(age), dtype=np.float32)
    column[at] = np.where(dropped, 0.0, weights)
    return column, metrics


def _weigh(rule: CorrectionRule, ratios: _Ratios) -> tuple[F64, Bool, Bool]:
    """Apply a rule: (weights, which of them a bound has changed, which tokens it drops), [C] each.

    sequence: w = prod_t rho_t;  geometric: w = (prod_t rho_t)^(1 / length), over the actions of a response.
    truncate: min(w, high);  clip: min(max(w, low), high);  mask: rho_t where low <= w <= high, else dropped.
    Sources: see `registry.PRESETS`; Ionides, Truncated Importance Sampling (2008).
    """
    if rule.level == "token":
        w = ratios.rho
    else:
        add = ratios.response_sums if rule.level == "sequence" else ratios.response_means
        w = _bounded_exp(add(ratios.log_rho))[ratios.owner]
    none = np.zeros(len(w), dtype=np.bool_)
    if rule.mode == "mask":
        # A NaN among the actor's log-probs fails both comparisons: it stays in the weight, and ends the run.
        return ratios.rho, none, (w < rule.low) | (w > rule.high)
    bounded = np.clip(w, rule.low if rule.mode == "clip" else 0.0, rule.high)
    return bounded, bounded != w, none


def _off_policy(ratios: _Ratios, advantages: NDArray[Any], delta: float) -> Bool:
    """Find the actions that off-policy sequence masking drops, [C].

        A_t < 0  and  mean over the response of log(pi_rollout / pi_actor) > delta

    A response that the actor has left behind is no longer pushed away. Where all tokens of a response have one
    advantage, it is dropped whole; with a critic the tokens with a negative one are. The paper's pi_actor is that of
    the optimizer step; here it is that of the training step's beginning, and the clipped ratio covers the rest.
    Source: DeepSeek-V3.2 (2025), arXiv 2512.02556, section 3.1.
    """
    behind = ratios.response_means(-ratios.log_rho) > delta
    return (advantages < 0) & behind[ratios.owner]


def _measure(ratios: _Ratios, truncated: Bool, dropped: Bool, age: I32) -> Metrics:
    """Describe all actions, and those of each age where some are stale."""
    log_rho, rho = np.clip(ratios.log_rho, -MAX_LOG_RATIO, MAX_LOG_RATIO), ratios.rho
    size = np.abs(log_rho)
    # k3 from expm1, as in `losses.approx_kl`: rho - 1 - log_rho cancels for small differences.
    columns = (size, -log_rho, np.expm1(log_rho) - log_rho, rho, rho * rho, truncated, dropped)
    if not age.any():  # twice as fast as counting by age
        return _describe(np.array([len(rho), *(column.sum() for column in columns)]), size, "correction")
    sums = np.stack([np.bincount(age), *(np.bincount(age, column) for column in columns)], axis=1)  # [oldest + 1, 8]
    metrics = _describe(sums.sum(axis=0), size, "correction")
    for updates in np.flatnonzero(sums[:, 0]):
        metrics |= _describe(sums[updates], size[age == updates], f"correction/age_{updates}")
    return metrics


def _describe(sums: NDArray[Any], size: F64, name: str) -> Metrics:
    """Average over actions: no action gives zeros.

    log_rho_mean, log_rho_max: of |log rho|. k1, k3: KL(engine's policy || actor's), estimated as by `approx_kl`.
    chi2: E[rho^2] - 1, the chi-square divergence. ess: (sum rho)^2 / (C sum rho^2), the effective sample size as a
    share of the actions. truncated, dropped: shares of the actions whose weight a bound has changed, or made 0.
    Sources: Schulman, Approximating KL Divergence (2020); Kong, A Note on Importance Sampling Using Standardized
    Weights (1992).
    """
    count = float(sums[0])
    mean, k1, k3, rho, squares, truncated, dropped = (float(total) / max(count, 1.0) for total in sums[1:])
    found = {
        "log_rho_mean": mean,
        "log_rho_max": float(size.max(initial=0.0)),
        "truncated": truncated,
        "dropped": dropped,
        "k1": k1,
        "k3": k3,
        "chi2": squares - 1.0 if squares else 0.0,
        "ess": rho * rho / squares if squares else 0.0,
    }
    return {f"{name}/{key}": value for key, value in found.items()}


def _bounded_exp(log_ratio: F64) -> F64:
    result: F64 = np.exp(np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return result
