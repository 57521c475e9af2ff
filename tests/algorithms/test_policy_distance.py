"""KL estimators, the controller of the KL coefficient, and a batch that several policies have sampled."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from slurm_rlhf.algorithms.policy_distance import KLController, ages, approx_kl, staleness
from slurm_rlhf.errors import CheckpointError, RunError
from slurm_rlhf.records import Trajectory, VersionSpan


def test_estimators_by_hand() -> None:
    # The policy gives the token 1/2; the reference 1/4 and 1: r = ln(1/2), ln 2.
    logprobs, ref = np.log([0.5, 0.5]), np.log([0.25, 1.0])
    ln2 = math.log(2)
    assert_allclose(approx_kl(logprobs, ref, "k1"), [ln2, -ln2], rtol=1e-6)
    assert_allclose(approx_kl(logprobs, ref, "k2"), [ln2**2 / 2] * 2, rtol=1e-6)
    assert_allclose(approx_kl(logprobs, ref, "k3"), [0.5 - 1 + ln2, 2 - 1 - ln2], rtol=1e-6)


def test_estimators_estimate_the_kl_of_the_two_distributions() -> None:
    """k1 and k3 are unbiased: their expectation under the policy is KL(policy || reference), not the reverse."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    exact = float(np.sum(p * np.log(p / q)))
    for estimator in ("k1", "k3"):
        assert float(np.sum(p * approx_kl(np.log(p), np.log(q), estimator))) == pytest.approx(exact, rel=1e-5)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(-200, 0, width=32), st.floats(-200, 0, width=32)), max_size=8))
def test_extreme_log_ratios_stay_finite(pairs: list[tuple[float, float]]) -> None:
    logprobs, ref = (np.array([p[i] for p in pairs], dtype=np.float32) for i in (0, 1))
    r = [float(b) - float(a) for a, b in zip(logprobs, ref, strict=True)]
    want = {"k1": [-x for x in r], "k2": [x * x / 2 for x in r], "k3": [math.expm1(min(x, 20)) - min(x, 20) for x in r]}
    for estimator, numbers in want.items():
        got = approx_kl(logprobs, ref, estimator)
        assert got.dtype == np.float32
        assert np.isfinite(got).all()
        assert_allclose(got, numbers, rtol=1e-6, atol=1e-30)


def test_small_log_ratios_do_not_cancel() -> None:
    assert_allclose(approx_kl([0.0], [1e-6], "k3"), [0.5e-12], rtol=1e-3)


def test_other_lengths() -> None:
    with pytest.raises(ValueError, match="ref_logprobs has"):
        approx_kl([0.0, 1.0], [0.0], "k1")


def test_fixed_controller_stays() -> None:
    controller = KLController(0.01)
    assert controller.update(100.0, 64) == 0.01
    controller.load_state_dict({"coef": 0.5})
    assert controller.coef == 0.01


def test_adaptive_controller_by_hand() -> None:
    controller = KLController(0.1, target=6.0, horizon=1000)
    assert controller.update(6.6, 100) == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    assert controller.update(600.0, 100) == pytest.approx(0.101 * 1.02)
    assert controller.update(0.0, 100) == pytest.approx(0.101 * 1.02 * 0.98)
    before = controller.coef
    assert controller.update(3.0, 0) == before


def test_batch_larger_than_the_horizon_does_not_turn_the_coefficient_negative() -> None:
    controller = KLController(0.1, target=6.0, horizon=1000)
    assert controller.update(0.0, 100_000) == pytest.approx(0.08)


def test_controller_refuses_a_kl_that_is_not_a_number() -> None:
    controller = KLController(0.1, target=6.0)
    with pytest.raises(RunError, match=r"mean KL per response is nan.*learning_rate"):
        controller.update(math.nan, 4)
    assert controller.coef == 0.1


def test_controller_state_goes_through_a_checkpoint() -> None:
    first, second = (KLController(0.1, target=6.0) for _ in range(2))
    first.update(9.0, 77)
    second.load_state_dict(first.state_dict())
    assert second.update(1.0, 5) == first.update(1.0, 5)
    for state in ({}, {"coef": math.nan}, {"coef": -1.0}, {"coef": "0.1"}, {"coef": True}):
        with pytest.raises(CheckpointError, match="KL controller"):
            second.load_state_dict(state)


def test_staleness_of_a_batch() -> None:
    def sampled(*spans: tuple[int, int, int]) -> Trajectory:
        end = spans[-1][1] if spans else 0
        floats, ids = np.zeros(end, dtype=np.float32), np.zeros(end, dtype=np.int32)
        versions = [VersionSpan(*span) for span in spans]
        return Trajectory(0, 0, ids, ids, floats, np.ones(end, dtype=bool), "stop", "", versions)

    batch = [sampled((0, 2, 3), (2, 3, 4)), sampled((0, 1, 5)), sampled(), sampled((0, 2, 4), (2, 4, 5))]
    age = ages(batch, 5)
    assert age.tolist() == [2, 2, 1, 0, 1, 1, 0, 0]
    mask = np.array([True] * 7 + [False])
    assert staleness(batch, age, mask) == {
        "stale_tokens": pytest.approx(5 / 7),
        "staleness_max": 2,
        "mixed_responses": 0.5,
    }
    assert staleness(batch[1:2], ages(batch[1:2], 5), mask[:1]) == {
        "stale_tokens": 0,
        "staleness_max": 0,
        "mixed_responses": 0,
    }
    assert staleness([], ages([], 5), mask[:0])["stale_tokens"] == 0
