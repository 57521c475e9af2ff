"""Measure how old the policies were that sampled a batch: pure functions of its token spans."""

from __future__ import annotations

import numpy as np

from slurm_rlhf.records import F32, I32, Bool, Trajectory


def ages(trajectories: list[Trajectory], version: int) -> I32:
    """Count the updates between the policy that sampled a token and policy `version`, [A], as `records.pack` orders."""
    parts = [np.zeros(0, dtype=np.int32)]
    for trajectory in trajectories:
        of_response = np.zeros(len(trajectory.response_ids), dtype=np.int32)
        for span in trajectory.versions:
            of_response[span.start : span.end] = version - span.version
        parts.append(of_response)
    return np.concatenate(parts)


def staleness(trajectories: list[Trajectory], age: I32, mask: Bool, drift: F32) -> dict[str, float]:
    """Compute the metrics of a batch that several policies may have sampled.

    stale_tokens: share of the tokens that an older policy than the actor's sampled; staleness_max: the age of the
    oldest; mixed_responses: share of the responses with tokens of several policies; stale_logprob_diff: mean distance
    of the sampling policy's log-prob from the actor's over the stale tokens, which is how far the policy has moved.

    age, mask, drift [A]; `drift` is the absolute difference of the two log-probs.
    """
    stale = mask & (age > 0)
    several = [len({span.version for span in trajectory.versions}) > 1 for trajectory in trajectories]
    metrics = {
        "stale_tokens": float(stale.sum() / max(mask.sum(), 1)),
        "staleness_max": float(age[mask].max(initial=0)),
        "mixed_responses": float(np.mean(several)) if several else 0.0,
    }
    if stale.any():
        metrics["stale_logprob_diff"] = float(drift[stale].mean())
    return metrics
