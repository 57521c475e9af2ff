"""Change rewards by how responses ended and how long they are: pure functions of arrays [N], float64.

They are applied to the rewards as normalised, before the clip and the group: see `shape`, which says in which order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from slurm_rlhf.algorithms.groups import Groups
from slurm_rlhf.algorithms.packed import F64
from slurm_rlhf.records import Bool


@dataclass(frozen=True, slots=True)
class Shaping:
    """Hold the settings; the defaults change nothing."""

    longest: int  # tokens that a response may have: rollout.max_new_tokens
    overlong_buffer_len: int = 0
    overlong_penalty_factor: float = 1.0
    stop_properly_penalty_coef: float = 1.0
    length_penalty_coef: float = 0.0


@dataclass(frozen=True, slots=True)
class Responses:
    """Hold what shaping looks at besides the reward, [N] each."""

    lengths: ArrayLike  # tokens
    ended: Bool  # False: the engine cut it off, at the length limit or for repetition
    repeated: Bool  # cut off for repetition
    correct: Bool
    groups: Groups


def shape(rewards: ArrayLike, responses: Responses, how: Shaping) -> tuple[F64, dict[str, float]]:
    """Return the shaped rewards [N], and metrics of each setting that is on.

    First `stop_properly` of the reward, then the overlong and the length penalty are added: they are not scaled with
    it. (OpenRLHF scales last, so that with coefficient 0 a response that was cut off does better than one that almost
    was.) A response that was cut off for repetition would have run to the limit, so it counts as one that did: as cut
    off, and with `how.longest` tokens. The detection saves the tokens and is no way around a penalty.

    Metrics: `shaping/cut_off`, `shaping/overlong`, `shaping/length`: the share of responses whose reward the setting
    lowers; `shaping/reward`: the mean of the result.
    """
    shaped = np.asarray(rewards, dtype=np.float64)
    lengths = np.where(responses.repeated, how.longest, responses.lengths)
    metrics: dict[str, float] = {}
    if how.stop_properly_penalty_coef < 1:
        before, shaped = shaped, stop_properly(shaped, responses.ended, how.stop_properly_penalty_coef)
        metrics["shaping/cut_off"] = _share(shaped < before)
    if how.overlong_buffer_len:
        penalty = overlong_penalty(lengths, how.longest, how.overlong_buffer_len, how.overlong_penalty_factor)
        shaped = shaped + penalty
        metrics["shaping/overlong"] = _share(penalty < 0)
    if how.length_penalty_coef:
        penalty = how.length_penalty_coef * length_reward(lengths, responses.correct, responses.groups)
        shaped = shaped + penalty
        metrics["shaping/length"] = _share(penalty < 0)
    if metrics:
        metrics["shaping/reward"] = float(np.mean(shaped)) if shaped.size else 0.0
    return shaped, metrics


def overlong_penalty(lengths: ArrayLike, longest: int, buffer: int, factor: float) -> F64:
    """Compute -min(len - (L - buffer), buffer) / buffer * factor where that is below 0, else 0; [N].

    L = longest: from 0 at L - buffer tokens it falls to -factor at L. Source: Yu et al., DAPO (2025), arXiv 2503.14476,
    eq. 13, with OpenRLHF's factor.
    """
    over = np.asarray(lengths, dtype=np.float64) - (longest - buffer)
    return -np.clip(over, 0, buffer) / buffer * factor


def stop_properly(rewards: ArrayLike, ended: Bool, coef: float) -> F64:
    """Give responses that were cut off reward * coef for 0 <= coef <= 1, and coef itself for coef < 0; [N].

    A negative reward comes nearer to 0 by the first. Source: OpenRLHF, `length_penalty`, after Liu et al., ProRL
    (2025), arXiv 2505.24864.
    """
    values = np.asarray(rewards, dtype=np.float64)
    cut = np.full_like(values, coef) if coef < 0 else values * coef
    return np.where(ended, values, cut)


def length_reward(lengths: ArrayLike, correct: Bool, groups: Groups) -> F64:
    """Reward the short among the responses to a prompt, and of those that are wrong only punish the long; [N].

        l = 0.5 - (len - min) / (max - min);  l if correct, else min(0, l);  0 where max = min

    min, max: over the group. Source: Kimi k1.5 (2025), arXiv 2501.12599, section 2.3.3.
    """
    length = np.asarray(lengths, dtype=np.float64)
    _, group = np.unique(groups, return_inverse=True)
    low, high = (np.full(group.max(initial=-1) + 1, start) for start in (np.inf, -np.inf))
    np.minimum.at(low, group, length)
    np.maximum.at(high, group, length)
    spread = (high - low)[group]
    reward = np.where(spread > 0, 0.5 - (length - low[group]) / np.where(spread > 0, spread, 1.0), 0.0)
    return np.where(correct, reward, np.minimum(reward, 0.0))


def _share(chosen: Bool) -> float:
    return float(np.mean(chosen)) if chosen.size else 0.0
