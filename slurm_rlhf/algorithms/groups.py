"""Compare rewards within the group of responses to one prompt: pure functions, float64.

rewards [N], groups [N]: which prompt each response answers, any numbers from 0 on, in any order, of any sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from slurm_rlhf.algorithms.packed import F64

EPSILON = 1e-6
"""Added to the standard deviation of a group, as in verl."""

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
