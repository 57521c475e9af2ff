"""Advantages: estimators by hand and by their formulas, rewards of groups, and GDPO's several rewards."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from waiting import HANG_S

from slurm_rlhf.algorithms.advantages import estimate, gae, token_rewards, whiten
from slurm_rlhf.algorithms.packed import response_sums
from slurm_rlhf.algorithms.registry import AdvantageInputs, find_algorithm
from slurm_rlhf.algorithms.reward_shaping import passes, refill
from slurm_rlhf.errors import ConfigError

CLIP = [-10.0, 10.0]


def mask_of(*responses: str) -> tuple[np.ndarray, np.ndarray]:
    """ "1101" is a response whose third token a tool wrote; "" is an empty one."""
    lengths = [len(r) for r in responses]
    mask = np.array([c == "1" for c in "".join(responses)], dtype=np.bool_)
    return mask, np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


masks = st.lists(st.text("01", max_size=7), max_size=6)
seeds = st.integers(0, 2**32 - 1)


# --- token_rewards


def test_integer_and_boolean_rewards() -> None:
    mask, offsets = mask_of("1", "1", "1")
    got = token_rewards(np.full(3, 0.5), 1.0, np.array([1, 0, 2], dtype=np.int64), mask, offsets, CLIP)
    assert_allclose(got, [0.5, -0.5, 1.5])
    assert_allclose(token_rewards(None, 1.0, [True, False, True], mask, offsets, CLIP), [1.0, 0.0, 1.0])


def test_no_reference_and_coefficient_zero_mean_no_penalty() -> None:
    mask, offsets = mask_of("11")
    assert_allclose(token_rewards(None, 0.1, [3.0], mask, offsets, CLIP), [0.0, 3.0])
    assert_allclose(token_rewards(np.array([np.inf, 1.0]), 0.0, [3.0], mask, offsets, CLIP), [0.0, 3.0])


@settings(max_examples=80, deadline=None)
@given(masks, seeds, st.none() | st.floats(0.0, 3.0), st.floats(-4.0, 0.0), st.floats(0.0, 4.0))
def test_token_rewards_against_the_definition(
    responses: list[str], seed: int, kl_coef: float | None, low: float, high: float
) -> None:
    """Token by token; None: there is no reference. What stands at masked positions is no number."""
    mask, offsets = mask_of(*responses)
    rng = np.random.default_rng(seed)
    rewards = rng.normal(scale=3.0, size=len(responses))
    kl = np.where(mask, rng.normal(size=len(mask)), np.nan).astype(np.float32)
    want = [-(kl_coef or 0.0) * float(penalty) if acted else 0.0 for penalty, acted in zip(kl, mask, strict=True)]
    for reward, (start, end) in zip(rewards, pairwise(offsets), strict=True):
        for last in [t for t in range(start, end) if mask[t]][-1:]:
            want[last] += min(max(float(reward), low), high)
    got = token_rewards(None if kl_coef is None else kl, kl_coef or 0.0, rewards, mask, offsets, [low, high])
    assert got.dtype == np.float32
    assert_allclose(got, want, rtol=1e-6, atol=1e-6)


# --- gae


@settings(max_examples=120, deadline=None)
@given(masks, seeds, st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_gae_against_the_definition(responses: list[str], seed: int, gamma: float, lambd: float) -> None:
    mask, offsets = mask_of(*responses)
    rng = np.random.default_rng(seed)
    drawn = (rng.normal(scale=3.0, size=len(mask)).astype(np.float32) for _ in range(2))
    rewards, values = (np.where(mask, numbers, np.float32("nan")) for numbers in drawn)
    want = np.zeros(len(mask))
    for start, end in pairwise(offsets):
        steps = [t for t in range(start, end) if mask[t]]
        value = [float(values[t]) for t in steps] + [0.0]
        deltas = [float(rewards[t]) + gamma * value[i + 1] - value[i] for i, t in enumerate(steps)]
        for i, t in enumerate(steps):
            want[t] = math.fsum((gamma * lambd) ** (k - i) * deltas[k] for k in range(i, len(steps)))
    advantages, returns = gae(rewards, values, mask, offsets, gamma, lambd)
    assert advantages.dtype == returns.dtype == np.float32
    assert_allclose(advantages, want, rtol=1e-6, atol=1e-6)
    assert_allclose(returns, np.where(mask, want + values, 0.0), rtol=1e-6, atol=1e-6)


def test_gae_of_a_response_does_not_depend_on_its_neighbours() -> None:
    """Bit for bit: otherwise a resumed run that packs differently would print other numbers."""
    rng = np.random.default_rng(0)
    mask, offsets = mask_of("1" * 50, "1011" * 9, "1")
    rewards, values = rng.normal(size=(2, len(mask)))
    together = gae(rewards, values, mask, offsets, 0.99, 0.95)
    for start, end in pairwise(offsets):
        alone = gae(rewards[start:end], values[start:end], mask[start:end], np.array([0, end - start]), 0.99, 0.95)
        for a, b in zip(alone, together, strict=True):
            assert_array_equal(a, b[start:end])


# --- whiten


@settings(max_examples=80, deadline=None)
@given(masks, seeds, st.floats(-1e4, 1e4), st.floats(0.01, 1e4))
def test_whiten_is_global_and_zero_at_masked_positions(
    responses: list[str], seed: int, shift: float, scale: float
) -> None:
    mask, _ = mask_of(*responses)
    x = np.where(mask, np.random.default_rng(seed).normal(shift, scale, size=len(mask)), np.nan)
    got = whiten(x, mask)
    assert_array_equal(got[~mask], 0.0)
    chosen = [float(v) for v, m in zip(x, mask, strict=True) if m]
    if chosen:
        mean = math.fsum(chosen) / len(chosen)
        variance = math.fsum((v - mean) ** 2 for v in chosen) / len(chosen)
        assert_allclose(got[mask], [(v - mean) / math.sqrt(max(variance, 1e-8)) for v in chosen], rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("error")
def test_whiten_of_nothing_and_of_equal_numbers() -> None:
    assert_array_equal(whiten([5.0, 6.0], np.array([False, False])), [0.0, 0.0])
    assert_array_equal(whiten([], np.zeros(0, dtype=np.bool_)), [])
    assert_array_equal(whiten([7.0, 7.0, 7.0], np.ones(3, dtype=np.bool_)), [0.0, 0.0, 0.0])


# --- the packed layout, the registry


@settings(max_examples=50, deadline=None)
@given(masks, seeds)
def test_response_sums(responses: list[str], seed: int) -> None:
    mask, offsets = mask_of(*responses)
    x = np.random.default_rng(seed).normal(size=len(mask))
    want = [math.fsum(x[t] for t in range(a, b) if mask[t]) for a, b in pairwise(offsets)]
    assert_allclose(response_sums(x, mask, offsets), want, atol=1e-12)


def test_columns_of_another_length_are_refused_and_not_broadcast() -> None:
    mask, offsets = mask_of("11", "1")
    with pytest.raises(ValueError, match=r"kl has shape \(1,\), action_mask has \(3,\)"):
        token_rewards(np.ones(1), 0.1, [1.0, 2.0], mask, offsets, CLIP)
    with pytest.raises(IndexError):
        token_rewards(None, 0.1, [1.0], mask, offsets, CLIP)
    with pytest.raises(ValueError, match="values has shape"):
        gae(np.ones(3), np.ones(2), mask, offsets, 1.0, 1.0)
    with pytest.raises(ValueError, match="offsets must rise from 0 to the 3 tokens"):
        gae(np.ones(3), np.ones(3), mask, np.array([0, 2]), 1.0, 1.0)
    with pytest.raises(ValueError, match="must be bool"):
        gae(np.ones(3), np.ones(3), mask.astype(np.int8), offsets, 1.0, 1.0)  # type: ignore[arg-type]
    with pytest.raises(IndexError):
        whiten(np.ones(1), mask)


def test_gae_by_its_name() -> None:
    mask, offsets = mask_of("101", "", "1")
    kl, values = np.float32([1, 9, 2, 3]), np.float32([0.5, 9, 0.25, 0.125])
    groups = np.zeros(3, dtype=np.int64)
    inputs = AdvantageInputs(np.array([1, 1, 20]), kl, values, mask, offsets, groups, 0.1, [-1.0, 4.0], 1.0, 0.0)
    columns = estimate(find_algorithm("gae"), inputs, no_whitening=True)
    advantages, returns = columns["advantages"], columns["returns"]
    assert_allclose(advantages, [-0.1 + 0.25 - 0.5, 0.0, 0.8 - 0.25, 3.7 - 0.125], rtol=1e-6)
    assert_allclose(returns, [0.15, 0.0, 0.8, 3.7], rtol=1e-6)
    assert_array_equal(estimate(find_algorithm("gae"), inputs)["advantages"], whiten(advantages, mask))


def test_the_critic_may_learn_with_a_lambda_of_its_own() -> None:
    """The policy's advantages stay; the returns are those of lambda 1: the reward, wherever the critic stands."""
    mask, offsets = mask_of("111", "01")
    values = np.float32([2, 3, 4, 9, 0.5])
    groups = np.zeros(2, dtype=np.int64)
    one = AdvantageInputs(np.array([2.0, 7.0]), None, values, mask, offsets, groups, 0.0, CLIP, 1.0, 0.5)
    alone = find_algorithm("gae").advantages(one)
    same = find_algorithm("gae").advantages(replace(one, lambd_critic=0.5))
    two = find_algorithm("gae").advantages(replace(one, lambd_critic=1.0))
    assert_array_equal(alone[0], two[0])
    assert_array_equal(two[1], [2, 2, 2, 0, 7])
    # A3 = 2 - 4, A2 = 4 - 3 + A3 / 2, A1 = 3 - 2 + A2 / 2; returns A + V.
    assert_array_equal(alone[0], [1, 0, -2, 0, 6.5])
    for found, wanted in zip(same, alone, strict=True):
        assert_array_equal(found, wanted)
    assert_array_equal(alone[1], [3, 3, 2, 0, 7])


def test_what_the_conductor_imports_is_free_of_torch() -> None:
    code = "import sys, slurm_rlhf.algorithms.registry, slurm_rlhf.algorithms.batching;sys.exit('torch' in sys.modules)"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False, timeout=HANG_S).returncode == 0


# --- groups -----------------------------------------------------------------------------------------------------------


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
    assert min(missing, most) <= refill(missing, passed, passed + dropped, most) <= most


def test_a_refill_counts_on_the_rate_so_far() -> None:
    assert refill(4, passed=3, judged=7, most=64) == 8
    assert refill(4, passed=0, judged=7, most=64) == 32
    assert refill(4, passed=7, judged=7, most=64) == 4


# --- gdpo -------------------------------------------------------------------------------------------------------------


GDPO = find_algorithm("gdpo")
HALF = 1 / math.sqrt(2)


def batch(
    components: Mapping[str, Sequence[float]], groups: Sequence[int], masks: Sequence[str], **changes: object
) -> AdvantageInputs:
    """One response per mask, which has a 1 for an action and a 0 for a gap."""
    mask = np.array([mark == "1" for mask in masks for mark in mask], dtype=np.bool_)
    offsets = np.concatenate([[0], np.cumsum([len(mask) for mask in masks], dtype=np.int64)])
    keys = {"kl": None, "kl_coef": 0.0, "clip_range": (-10.0, 10.0), "gamma": 1.0, **changes}
    return AdvantageInputs(
        rewards=np.full(len(masks), np.nan), values=None, action_mask=mask, offsets=offsets, groups=np.array(groups),
        lambd=1.0, components={name: np.array(values) for name, values in components.items()}, **keys,  # type: ignore[arg-type]
    )  # fmt: skip


def summed(inputs: AdvantageInputs) -> np.ndarray:
    return estimate(GDPO, inputs, no_whitening=True)["advantages"]


def test_by_hand() -> None:
    """Sums are equal in the first group, so GRPO sees nothing; the second has no spread in one component."""
    inputs = batch({"right": [1, 0, 1, 1], "short": [0, 1, 4, 0]}, [0, 0, 1, 1], ["11", "1", "101", "1"])
    assert_allclose(summed(inputs), [0, 0, 0, HALF, 0, HALF, -HALF], rtol=1e-5, atol=1e-12)
    inputs.component_weights = {"right": 2.0, "short": 1.0}
    plain = summed(inputs)
    assert_allclose(plain, [HALF, HALF, -HALF, HALF, 0, HALF, -HALF], rtol=1e-5)
    assert_array_equal(estimate(GDPO, inputs)["advantages"], whiten(plain, inputs.action_mask))
    inputs.component_weights = {"short": -0.5}
    assert_allclose(summed(inputs), np.array([1, 1, -1, -1, 0, -1, 1]) * HALF / 2, rtol=1e-5)


def test_without_division_it_is_the_weighted_sum_less_its_mean() -> None:
    inputs = batch({"right": [1, 0], "short": [0, 4]}, [0, 0], ["1", "1"], no_std_norm=True)
    assert_array_equal(summed(inputs), [-1.5, 1.5])
    assert_array_equal(estimate(GDPO, inputs)["advantages"], [-1.5, 1.5])


def test_each_component_is_clipped_and_not_their_sum() -> None:
    inputs = batch({"a": [9, 1], "b": [0, 1]}, [0, 0], ["1", "1"], no_std_norm=True, clip_range=(0.0, 2.0))
    assert_array_equal(summed(inputs), [0, 0])


def test_groups_without_spread_and_a_response_alone_get_nothing() -> None:
    inputs = batch({"a": [0.1, 0.1, 0.1, 7], "b": [3, 3, 3, 1]}, [0, 0, 0, 5], ["1", "11", "", "1"])
    assert_array_equal(summed(inputs), [0] * 4)
    assert_array_equal(estimate(GDPO, inputs)["advantages"], [0] * 4)


def test_what_it_needs() -> None:
    with pytest.raises(ConfigError, match=r'^algo.advantage.estimator = gdpo takes several .*"components": '):
        estimate(GDPO, batch({}, [0], ["1"]))
    inputs = batch({"right": [1.0], "short": [1.0]}, [0], ["1"], component_weights={"write": 1.0})
    with pytest.raises(ConfigError, match=r"^algo.advantage.gdpo_reward_keys names .*'write'.* 'right', 'short'"):
        estimate(GDPO, inputs)


drawn_responses = st.lists(
    st.tuples(st.lists(st.integers(-3, 3), min_size=3, max_size=3), st.integers(0, 3), st.text("01", max_size=4)),
    min_size=1,
    max_size=10,
)


@settings(max_examples=60, deadline=None)
@given(drawn_responses, st.lists(st.floats(-2, 2), min_size=3, max_size=3), st.floats(0, 1), st.floats(0, 2))
def test_written_out(
    drawn: list[tuple[list[int], int, str]], weights: list[float], gamma: float, kl_coef: float
) -> None:
    """Integer rewards, ragged groups in any order, masks with gaps, empty responses, a KL of 1 at every token."""
    names = ["a", "b", "c"]
    rewards, groups, masks = ([row[i] for row in drawn] for i in range(3))
    components = {name: [row[k] for row in rewards] for k, name in enumerate(names)}  # type: ignore[index]
    kl = np.ones(sum(map(len, masks)), dtype=np.float32)  # type: ignore[arg-type]
    inputs = batch(components, groups, masks, kl=kl, kl_coef=kl_coef, gamma=gamma)  # type: ignore[arg-type]
    inputs.component_weights = dict(zip(names, weights, strict=True))
    wanted = []
    for mine, group, mask in drawn:
        mates = [other[0] for other in drawn if other[1] == group]
        total = 0.0
        for k, weight in enumerate(weights):
            mean = math.fsum(mate[k] for mate in mates) / len(mates)
            std = math.sqrt(math.fsum((mate[k] - mean) ** 2 for mate in mates) / max(len(mates) - 1, 1))
            total += weight * (mine[k] - mean) / (std + 1e-6)
        for place, mark in enumerate(mask):
            behind = mask[place + 1 :].count("1")
            penalty = kl_coef * math.fsum(gamma**k for k in range(behind + 1))
            wanted.append(gamma**behind * total - penalty if mark == "1" else 0.0)
    found = summed(inputs)
    assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    assert_array_equal(estimate(GDPO, inputs)["advantages"], whiten(found, inputs.action_mask))
