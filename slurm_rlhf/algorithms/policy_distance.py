"""Measure how far policies are apart: the KL divergence and the weight of its penalty, and the age of samples."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from slurm_rlhf.errors import RunError
from slurm_rlhf.records import F32, I32, Bool, Trajectory

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
