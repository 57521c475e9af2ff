"""Penalties for responses that are long or were cut off: by hand, and written out under hypothesis."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from slurm_rlhf.algorithms.reward_shaping import (
    overlong_penalty,
    shape,
)
from slurm_rlhf.config.schema_models import Reward
from slurm_rlhf.records import LENGTH, REPETITION, STOP, Experience


def shaping(buffer: int = 0, factor: float = 1.0, stop: float = 1.0, length: float = 0.0) -> Reward:
    """Return keys of the group reward."""
    return Reward(
        overlong_buffer_len=buffer,
        overlong_penalty_factor=factor,
        stop_properly_penalty_coef=stop,
        length_penalty_coef=length,
    )


REASONS = {"s": STOP, "l": LENGTH, "r": REPETITION}


def responses(
    lengths: list[int], ended: str, correct: str = "", groups: list[int] | None = None
) -> tuple[Experience, np.ndarray, np.ndarray]:
    """`ended` has an s for a response that stopped, l and r for one cut off by length and for repetition."""
    sizes, none = np.array(lengths, dtype=np.int32), np.zeros(len(lengths), dtype=np.int32)
    mask, reasons = np.ones(int(sizes.sum()), dtype=np.bool_), [REASONS[mark] for mark in ended]
    exp = Experience(none, sizes, np.zeros(len(mask), dtype=np.int32), mask, none.astype(np.float32), {}, reasons)
    right = np.array([mark == "1" for mark in correct or "1" * len(lengths)], dtype=np.bool_)
    return exp, right, np.array(groups or [0] * len(lengths), dtype=np.int64)


def test_overlong_by_hand() -> None:
    """DAPO's figures: 16,384 tokens without a penalty, a buffer of 4,096."""
    found = overlong_penalty([0, 16384, 16385, 18432, 20480, 30000], 20480, 4096, 1.0)
    assert_array_equal(found, [0, 0, -1 / 4096, -0.5, -1, -1])
    assert_array_equal(overlong_penalty([0, 5, 10], 10, 10, 3.0), [0, -1.5, -3])


def test_nothing_on_changes_nothing() -> None:
    found, metrics = shape([1, -2], *responses([5, 9], "sl"), 9, shaping())
    assert_array_equal(found, [1, -2])
    assert metrics == {}


def test_all_together_and_their_metrics() -> None:
    """The fixed reward of a response that was cut off stands for the reward, and the penalties are added to it."""
    how = shaping(5, stop=-1.0, length=2.0)
    found, metrics = shape([1, 1, 0, 1], *responses([5, 6, 10, 10], "ssls", "1101"), 10, how)
    # Over the buffer: 0, 1/5, 1, 1. Lengths from 0.5 at 5 to -0.5 at 10, twice.
    assert_allclose(found, [1 + 1, 1 - 0.2 + 0.6, -1 - 1 - 1, 1 - 1 - 1])
    assert metrics == {
        "shaping/cut_off": 0.25,
        "shaping/overlong": 0.75,
        "shaping/length": 0.5,
        "shaping/reward": pytest.approx((2 + 1.4 - 3 - 1) / 4),
    }
    # Half of the reward, but the whole of the penalty: cut off is worse than almost.
    found, _ = shape([1, 1], *responses([9, 10], "sl"), 10, shaping(5, 1.0, 0.5))
    assert_allclose(found, [1 - 0.8, 0.5 - 1])


def test_a_response_that_repeats_itself_is_judged_as_if_it_had_run_to_the_limit() -> None:
    how = shaping(50, stop=0.5, length=1.0)
    early, _ = shape([1, 1, 1], *responses([20, 3, 60], "srs"), 100, how)
    late, _ = shape([1, 1, 1], *responses([20, 100, 60], "sls"), 100, how)
    assert_array_equal(early, late)
    assert_array_equal(early, [1.5, 0.5 - 1 - 0.5, 1 - 0.2 + 0])


drawn_responses = st.lists(
    st.tuples(st.floats(-3, 3, width=32), st.integers(0, 20), st.sampled_from("slr"), st.booleans(), st.integers(0, 2)),
    max_size=9,
)


@settings(max_examples=80, deadline=None)
@given(drawn_responses, st.integers(0, 20), st.sampled_from([-1.0, 0.0, 0.5, 1.0]), st.sampled_from([0.0, 0.3]))
def test_written_out(
    drawn: list[tuple[float, int, str, bool, int]], buffer: int, coef: float, length_coef: float
) -> None:
    """Ragged groups in any order, empty responses, every setting on or off."""
    longest, wanted = 20, []
    sizes = [longest if reason == "r" else length for _, length, reason, _, _ in drawn]
    for (reward, _, reason, right, group), size in zip(drawn, sizes, strict=True):
        value = reward
        if reason != "s" and coef < 1:
            value = coef if coef < 0 else value * coef
        if buffer and size > longest - buffer:
            value -= min(size - (longest - buffer), buffer) / buffer * 2.0
        mates = [other for other, row in zip(sizes, drawn, strict=True) if row[4] == group]
        if max(mates) > min(mates):
            lam = 0.5 - (size - min(mates)) / (max(mates) - min(mates))
            value += length_coef * (lam if right else min(0.0, lam))
        wanted.append(value)
    made = responses(
        [row[1] for row in drawn], "".join(row[2] for row in drawn), "".join("01"[row[3]] for row in drawn),
        [row[4] for row in drawn],
    )  # fmt: skip
    found, metrics = shape([row[0] for row in drawn], *made, longest, shaping(buffer, 2.0, coef, length_coef))
    assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)
    on = {"shaping/overlong": buffer, "shaping/cut_off": coef < 1, "shaping/length": length_coef}
    assert {name for name, value in on.items() if value} == set(metrics) - {"shaping/reward"}
