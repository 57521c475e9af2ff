"""Which groups dynamic sampling keeps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_rlhf.algorithms.reward_shaping import passes, refill


@pytest.mark.parametrize(
    ("values", "bounds", "kept"),
    [
        ([0, 1, 1, 0], [], True),
        ([1, 1, 1, 1], [], False),
        ([0, 0], [], False),
        ([-3, 5], [], True),
        ([0, 1, 1, 1], [0.2, 0.8], True),
        ([0, 0, 0, 0, 1], [0.2, 0.8], False),  # at an end
        ([1, 1, 1, 1, 0], [0.2, 0.8], False),
        ([0.5, 0.5], [0.2, 0.8], False),  # in the middle, and nothing to compare
        ([0, 1], [0, 1], True),
        ([-1, 0], [0, 1], False),
    ],
)
def test_kept(values: list[float], bounds: list[float], kept: bool) -> None:
    assert passes(np.array(values, dtype=np.float32), bounds) is kept


def test_integer_rewards_are_judged_like_others() -> None:
    assert passes(np.array([0, 1]), [0, 1]) is True  # type: ignore[arg-type]


@given(st.integers(1, 500), st.integers(0, 500), st.integers(0, 500), st.integers(1, 500))
def test_a_refill_is_at_least_what_is_missing_unless_that_is_more_than_at_a_time(
    missing: int, passed: int, dropped: int, most: int
) -> None:
    count = refill(missing, passed, passed + dropped, most)
    assert min(missing, most) <= count <= most


def test_a_refill_counts_on_the_rate_so_far() -> None:
    assert refill(4, passed=3, judged=7, most=64) == 8
    assert refill(4, passed=0, judged=7, most=64) == 32
    assert refill(4, passed=7, judged=7, most=64) == 4
