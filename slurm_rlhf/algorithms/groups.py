"""Compare rewards within the group of responses to one prompt, and decide which groups are trained on.

rewards [N], groups [N]: which prompt each response answers, any numbers from 0 on, in any order, of any sizes. Pure
functions, float64.

Dynamic sampling: responses are compared with each other, so a group that is all right or all wrong has advantages of 0
and teaches nothing. Source: Yu et al., DAPO (2025), arXiv 2503.14476, section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from slurm_rlhf.algorithms.packed import F64
from slurm_rlhf.records import F32

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

    passed of judged groups were kept so far; one more is added to both, so that none of a few is not none for ever.
    """
    return min(most, math.ceil(missing * (judged + 1) / (passed + 1)))
