"""Decide which groups of responses are trained on: dynamic sampling, and how many prompts its refills need.

A group is the n responses to one prompt. Its responses are compared with each other, so a group that is all right or
all wrong has advantages of 0 and teaches nothing. Source: Yu et al., DAPO (2025), arXiv 2503.14476, section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from slurm_rlhf.records import F32

AT_AN_END = 1e-6
"""A mean this close to an end of the range counts as outside, as in OpenRLHF."""


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
