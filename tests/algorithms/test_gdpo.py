"""GDPO: each component of the reward is normalised in its group; by hand, and written out under hypothesis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from slurm_rlhf.algorithms.advantages import estimate, whiten
from slurm_rlhf.algorithms.registry import AdvantageInputs, find_algorithm
from slurm_rlhf.errors import ConfigError

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
