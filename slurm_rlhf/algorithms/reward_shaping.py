"""Scale rewards, change them by how responses ended and how long they are, and compare them within their group.

Pure functions of arrays, float64: rewards [N]; groups [N]: which prompt each response answers, any numbers from 0 on,
in any order, of any sizes. Penalties are applied to the rewards as normalised, before the clip and the group: see
`shape`, which says in which order.

Dynamic sampling: responses are compared with each other, so a group that is all right or all wrong has advantages of 0
and teaches nothing. Source: Yu et al., DAPO (2025), arXiv 2503.14476, section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from slurm_rlhf.algorithms.advantages import MIN_VARIANCE
from slurm_rlhf.algorithms.packed import F64, find_actions
from slurm_rlhf.records import F32, REPETITION, STOP, Bool, Experience

EPSILON = 1e-6
"""Added to the standard deviation of a group, as in verl."""

AT_AN_END = 1e-6
"""A mean this close to an end of the range counts as outside: its rounding must not decide."""

Groups = NDArray[Any]


def clipped(rewards: ArrayLike, clip_range: Sequence[float]) -> F64:
    """Clip rewards of any number type to (low, high), [N]."""
    return np.clip(np.asarray(rewards, dtype=np.float64), clip_range[0], clip_range[1])


def counted(groups: Groups) -> F64:
    """Count the responses in the group of each response, [N]."""
    return np.bincount(groups).astype(np.float64)[groups]


def summed(values: ArrayLike, groups: Groups) -> F64:
    """Add up `values` [N] over the group of each response, [N]."""
    return np.bincount(groups, np.asarray(values, dtype=np.float64)).astype(np.float64)[groups]


def from_first(rewards: F64, groups: Groups) -> F64:
    """Subtract the first reward of the group, [N].

    Means are taken of these, so that equal rewards differ from their mean by nothing and not by rounding.
    """
    _, first, group = np.unique(groups, return_index=True, return_inverse=True)
    offset: F64 = rewards - rewards[first][group]
    return offset


def centred(rewards: F64, groups: Groups) -> F64:
    """Subtract the mean of the group, [N]; exactly 0 where all rewards of a group are equal."""
    offset = from_first(rewards, groups)
    return offset - summed(offset, groups) / counted(groups)


def normed(rewards: F64, groups: Groups, no_std_norm: bool = False) -> F64:
    """Compute (reward - mean) / (std + 1e-6) within the group, [N], std with n - 1; with no_std_norm reward - mean."""
    difference = centred(rewards, groups)
    if no_std_norm:
        return difference
    std = np.sqrt(summed(difference**2, groups) / np.maximum(counted(groups) - 1, 1))
    return difference / (std + EPSILON)


def passes(values: F32, bounds: Sequence[float] = ()) -> bool:
    """Tell whether a group is trained on.

    values: [n], the scores of its responses, or their rewards where there are no scores. bounds: nothing, or low and
    high; the mean must lie between them, and not at an end. Whatever they are, a group without spread is dropped.
    """
    if values.min() == values.max():
        return False
    if not bounds:
        return True
    low, high = bounds
    return low + AT_AN_END < float(np.mean(values, dtype=np.float64)) < high - AT_AN_END


def refill(missing: int, passed: int, judged: int, most: int) -> int:
    """Count the prompts of the next round: as many as should bring the `missing` groups, at most `most`.

    passed of judged groups were kept so far; one is added to both, so that the estimate is above 0 if none passed yet.
    """
    return min(most, math.ceil(missing * (judged + 1) / (passed + 1)))


@dataclass(frozen=True, slots=True)
class FixedScale:
    """Normalise by the mean and standard deviation in a reward model's config.json, as OpenRLHF writes them.

    Source: OpenRLHF, `models/model.py`, there inside the model's forward.
    """

    mean: float
    std: float

    def with_batch(self, rewards: ArrayLike) -> FixedScale:
        """Return the scale for a batch [N]: this one."""
        return self


@dataclass(frozen=True, slots=True)
class RunningScale:
    """Normalise by mean and population standard deviation of all rewards of the run so far, this batch included.

    Batches are merged in float64 by

        delta = mean_b - mean_a,  n = n_a + n_b
        mean = mean_a + delta n_b / n,  M2 = M2_a + M2_b + delta^2 n_a n_b / n,  std = sqrt(max(M2 / n, 1e-8))

    so that a run that is resumed has the same numbers, bit for bit. Source: Chan, Golub and LeVeque, Updating formulae
    and a pairwise algorithm for computing sample variances (1979).
    """

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0

    @property
    def std(self) -> float:
        return math.sqrt(max(self.m2 / self.count if self.count else 0.0, MIN_VARIANCE))

    def with_batch(self, rewards: ArrayLike) -> RunningScale:
        """Return the scale for a batch [N]; this one stays as it is."""
        batch = np.asarray(rewards, dtype=np.float64)
        if not batch.size:
            return self
        count = self.count + batch.size
        mean = float(batch.mean())
        delta = mean - self.mean
        m2 = self.m2 + float(((batch - mean) ** 2).sum()) + delta**2 * self.count * batch.size / count
        return RunningScale(count, self.mean + delta * batch.size / count, m2)


RewardScale = FixedScale | RunningScale
"""Normalises a batch of rewards, as reward.normalize_enable asks."""


def normalized(rewards: ArrayLike, scale: RewardScale) -> F32:
    """Compute (rewards - mean) / standard deviation, [N]."""
    return ((np.asarray(rewards, dtype=np.float64) - scale.mean) / scale.std).astype(np.float32)


def clipped_share(rewards: ArrayLike, clip_range: Sequence[float]) -> float:
    """Compute the share of rewards [N] outside `clip_range` (low, high), which a clip changes; 0 for no rewards."""
    values = np.asarray(rewards, dtype=np.float64)
    return float(np.mean((values < clip_range[0]) | (values > clip_range[1]))) if values.size else 0.0


MUCH = 0.05
"""Share of clipped rewards above which a warning says so."""


def clip_warning(share: float, warned: float, clip_range: Sequence[float]) -> str:
    """Warn of `share` of the rewards clipped, where `warned` is the largest share warned of so far; "" for nothing."""
    if share <= max(MUCH, warned):
        return ""
    low, high = clip_range
    return (
        f"warning: {share:.0%} of the rewards lie outside reward.clip_range = [{low:g}, {high:g}] and count as its "
        "ends, so they no longer tell better from worse: widen the range, scale the rewards, or set "
        "reward.normalize_enable = true"
    )


def shape(
    rewards: ArrayLike, experience: Experience, correct: Bool, groups: Groups, longest: ArrayLike, how: Any
) -> tuple[F64, dict[str, float]]:
    """Return the shaped rewards [N], and metrics of each setting that is on.

    correct, groups [N]. longest: tokens that a response may have, [N] or one number; those of an episode are all after
    its first prompt, observations, too. how: the group `reward` of the configuration.

    First `stop_properly` scales the reward, then the overlong and the length penalty are added, which it does not
    scale. (OpenRLHF scales last, so that with coefficient 0 a response that was cut off does better than one that
    almost was.) A response that was cut off for repetition would have run to the limit, so it counts as one that did:
    as cut off, and with `longest` tokens. So the detection saves tokens without avoiding a penalty.

    Metrics: `shaping/cut_off`, `shaping/overlong`, `shaping/length`: the share of responses whose reward the setting
    lowers; `shaping/reward`: the mean of the result.
    """
    shaped = np.asarray(rewards, dtype=np.float64)
    reasons = np.array(experience.finish_reasons or [STOP] * len(experience))
    counts = find_actions(experience.action_mask, experience.action_offsets).counts
    lengths, whole = (np.where(reasons == REPETITION, longest, each) for each in (counts, experience.response_lens))
    metrics: dict[str, float] = {}
    if how.stop_properly_penalty_coef < 1:
        before, shaped = shaped, stop_properly(shaped, reasons == STOP, how.stop_properly_penalty_coef)
        metrics["shaping/cut_off"] = _share(shaped < before)
    if how.overlong_buffer_len:
        penalty = overlong_penalty(whole, longest, how.overlong_buffer_len, how.overlong_penalty_factor)
        shaped = shaped + penalty
        metrics["shaping/overlong"] = _share(penalty < 0)
    if how.length_penalty_coef:
        penalty = how.length_penalty_coef * length_reward(lengths, correct, groups)
        shaped = shaped + penalty
        metrics["shaping/length"] = _share(penalty < 0)
    if metrics:
        metrics["shaping/reward"] = float(np.mean(shaped)) if shaped.size else 0.0
    return shaped, metrics


def overlong_penalty(lengths: ArrayLike, longest: ArrayLike, buffer: int, factor: float) -> F64:
    """Compute -min(len - (L - buffer), buffer) / buffer * factor where that is below 0, else 0; [N].

    L = longest: from 0 at L - buffer tokens it falls to -factor at L. Source: Yu et al., DAPO (2025), arXiv 2503.14476,
    eq. 13, with OpenRLHF's factor.
    """
    over = np.asarray(lengths, dtype=np.float64) - (np.asarray(longest) - buffer)
    return -np.clip(over, 0, buffer) / buffer * factor


def stop_properly(rewards: ArrayLike, ended: Bool, coef: float) -> F64:
    """Give responses that were cut off reward * coef for 0 <= coef <= 1, and coef itself for coef < 0; [N].

    With coef >= 0 a negative reward comes nearer to 0. Source: OpenRLHF, `length_penalty`, after Liu et al., ProRL
    (2025), arXiv 2505.24864.
    """
    values = np.asarray(rewards, dtype=np.float64)
    cut = np.full_like(values, coef) if coef < 0 else values * coef
    return np.where(ended, values, cut)


def length_reward(lengths: ArrayLike, correct: Bool, groups: Groups) -> F64:
    """Reward short responses to a prompt and punish long ones; a wrong response is never rewarded; [N].

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
