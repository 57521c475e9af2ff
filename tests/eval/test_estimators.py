"""pass@k against all subsets, the majority vote, and intervals against what is known of them."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from slurm_rlhf.eval.report import bootstrap, majority_score, pass_at_k, wilson

SIZES = range(1, 9)


@pytest.mark.parametrize("samples", SIZES)
def test_pass_at_k_is_the_share_of_all_subsets_with_a_correct_response(samples: int) -> None:
    for correct in range(samples + 1):
        right = [place < correct for place in range(samples)]
        for k in range(1, samples + 1):
            subsets = list(itertools.combinations(right, k))
            share = sum(any(subset) for subset in subsets) / len(subsets)
            assert pass_at_k(samples, correct, k) == pytest.approx(share, abs=1e-14)


def test_pass_at_k_of_many_samples_does_not_overflow() -> None:
    exact = 1 - math.comb(19_990, 5000) / math.comb(20_000, 5000)
    assert pass_at_k(20_000, 10, 5000) == pytest.approx(exact, rel=1e-12)
    assert pass_at_k(20_000, 0, 20_000) == 0.0
    assert pass_at_k(20_000, 1, 20_000) == 1.0


@pytest.mark.parametrize(
    ("answers", "scores", "expected"),
    [
        (["7", "7", "3"], [1, 1, 0], 1.0),
        (["3", "3", "7"], [0, 0, 1], 0.0),
        (["7", "3"], [1, 0], 0.5),  # a tie: one of the two by lot
        ([None, None, "7"], [0, 0, 1], 1.0),  # who says nothing does not vote
        ([None, None], [1, 1], 0.0),
        (["7", "7", "3"], [1, 0, 0], 0.5),  # the same answer, scored unlike
    ],
)
def test_the_majority_is_scored(answers: list[str | None], scores: list[float], expected: float) -> None:
    assert majority_score(answers, scores) == expected


def test_the_interval_of_a_share_is_that_of_a_binomial() -> None:
    values = np.array([1.0] * 120 + [0.0] * 280)
    found = bootstrap(values, np.ones(400), 7, "share")
    half = 1.96 * math.sqrt(0.3 * 0.7 / 400)
    assert found.value == pytest.approx(0.3)
    assert found.low == pytest.approx(0.3 - half, abs=0.006)
    assert found.high == pytest.approx(0.3 + half, abs=0.006)


def test_it_draws_prompts_and_not_responses() -> None:
    """8 responses to each prompt that are all alike are as good as one: the interval is no narrower."""
    alone = bootstrap(np.array([1.0] * 30 + [0.0] * 70), np.ones(100), 1, "x")
    alike = bootstrap(np.array([8.0] * 30 + [0.0] * 70), np.full(100, 8.0), 1, "x")
    assert (alike.value, alike.low, alike.high) == pytest.approx((alone.value, alone.low, alone.high))


def test_it_holds_the_truth_as_often_as_it_says() -> None:
    draws = np.random.default_rng(3)
    held = 0
    for trial in range(200):
        values = draws.binomial(4, draws.beta(2, 3, size=150)) / 4
        found = bootstrap(values, np.ones(150), trial, "mean")
        held += found.low <= 0.4 <= found.high
    assert 0.90 <= held / 200 <= 0.99


def test_seed_and_name_choose_the_draws() -> None:
    values, ones = np.linspace(0, 1, 50), np.ones(50)
    assert bootstrap(values, ones, 1, "a") == bootstrap(values, ones, 1, "a")
    assert bootstrap(values, ones, 1, "a") != bootstrap(values, ones, 2, "a")
    assert bootstrap(values, ones, 1, "a") != bootstrap(values, ones, 1, "b")
    one = bootstrap(np.array([0.5]), np.ones(1), 1, "a")
    assert (one.value, one.low, one.high) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(("prompts", "share", "samples"), [(20, 0.98, 1), (20, 0.02, 1), (200, 0.5, 1), (50, 0.9, 4)])
def test_the_interval_of_a_share_holds_it_as_often_as_it_says(prompts: int, share: float, samples: int) -> None:
    """Many data sets are drawn, also with nearly all scores equal; responses to one prompt are all alike here."""
    rng = np.random.default_rng(1)
    counts = np.full(prompts, float(samples))
    found = [wilson((rng.random(prompts) < share) * counts, counts) for _ in range(2000)]
    covered = np.mean([one.low <= share <= one.high for one in found])
    assert 0.92 <= covered <= 0.99


def test_responses_that_do_not_resemble_each_other_count_each() -> None:
    rng = np.random.default_rng(2)
    sums = rng.binomial(4, 0.9, 50).astype(np.float64)
    apart, together = wilson(sums, np.full(50, 4.0)), wilson((sums > 3) * 4.0, np.full(50, 4.0))
    assert apart.high - apart.low < 0.7 * (together.high - together.low)
    assert wilson(np.ones(20), np.ones(20)).low == pytest.approx(20 / (20 + 1.96**2), abs=1e-4)
