"""Normalise rewards to mean 0 and standard deviation 1, and tell how many a clip changes: pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from slurm_rlhf.algorithms.advantages import MIN_VARIANCE
from slurm_rlhf.records import F32


class RewardScale(Protocol):
    """Normalise a batch of rewards, as reward.normalize_enable asks."""

    def with_batch(self, rewards: ArrayLike) -> RewardScale:
        """Return the scale for a batch [N]; this one stays as it is."""
        ...

    def normalize(self, rewards: ArrayLike) -> F32:
        """Compute (rewards - mean) / standard deviation, [N]."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs, as JSON can hold it."""
        ...


@dataclass(frozen=True, slots=True)
class FixedScale:
    """Normalise by the mean and standard deviation in a reward model's config.json, as OpenRLHF writes them.

    Source: OpenRLHF, `models/model.py`, there inside the model's forward.
    """

    mean: float
    std: float

    def with_batch(self, rewards: ArrayLike) -> FixedScale:
        return self

    def normalize(self, rewards: ArrayLike) -> F32:
        return ((np.asarray(rewards, dtype=np.float64) - self.mean) / self.std).astype(np.float32)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "std": self.std}


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
        batch = np.asarray(rewards, dtype=np.float64)
        if not batch.size:
            return self
        count = self.count + batch.size
        mean = float(batch.mean())
        delta = mean - self.mean
        m2 = self.m2 + float(((batch - mean) ** 2).sum()) + delta**2 * self.count * batch.size / count
        return RunningScale(count, self.mean + delta * batch.size / count, m2)

    def normalize(self, rewards: ArrayLike) -> F32:
        return ((np.asarray(rewards, dtype=np.float64) - self.mean) / self.std).astype(np.float32)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "mean": self.mean, "m2": self.m2}


def clipped_share(rewards: ArrayLike, clip_range: Sequence[float]) -> float:
    """Count the share of rewards [N] outside `clip_range` (low, high), which a clip changes; 0 of none."""
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
