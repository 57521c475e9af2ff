"""Advantages of the methods without a critic, and the aggregations: by hand, and written out under hypothesis."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from slurm_rlhf.algorithms.advantages import estimate, whiten
from slurm_rlhf.algorithms.losses import loss_weights
from slurm_rlhf.algorithms.registry import AdvantageInputs, built_in, find_algorithm
from slurm_rlhf.errors import ConfigError

GROUPS = ["reinforce_baseline", "rloo", "group_norm", "dr_grpo", "opo", "max_rl"]


def batch(rewards: list[float], groups: list[int], masks: list[str], **changes: object) -> AdvantageInputs:
    """One response per reward; `masks` has a 1 for an action and a 0 for a gap."""
    mask = np.array([mark == "1" for mask in masks for mark in mask], dtype=np.bool_)
    offsets = np.concatenate([[0], np.cumsum([len(mask) for mask in masks])])
    settings = {"kl": None, "kl_coef": 0.0, "clip_range": (-10.0, 10.0), "gamma": 1.0, **changes}
    return AdvantageInputs(
        rewards=np.array(rewards), values=None, action_mask=mask, offsets=offsets, groups=np.array(groups), lambd=0.5,
        **settings,  # type: ignore[arg-type]
    )  # fmt: skip


def advantages(name: str, inputs: AdvantageInputs) -> np.ndarray:
    return estimate(find_algorithm(name), inputs, no_whitening=True)["advantages"]


@pytest.mark.parametrize("name", GROUPS)
def test_groups_without_spread_or_of_one_get_nothing(name: str) -> None:
    """Equal rewards whose mean rounds, integers, a response alone, an empty response."""
    equal = batch([0.1, 0.1, 0.1], [0, 0, 0], ["1", "11", ""])
    assert_array_equal(advantages(name, equal), [0, 0, 0])
    integers = batch([1, 1], [0, 0], ["1", "1"])
    assert integers.rewards.dtype == np.int64
    assert_array_equal(advantages(name, integers), [0, 0])
    assert_array_equal(advantages(name, batch([5.0], [0], ["11"])), [0, 0])


@pytest.mark.parametrize("name", GROUPS)
def test_the_clip_is_the_rewards_and_not_the_comparisons(name: str) -> None:
    outside = advantages(name, batch([100.0, 0.0], [0, 0], ["1", "1"], clip_range=(0.0, 1.0)))
    assert_array_equal(outside, advantages(name, batch([1.0, 0.0], [0, 0], ["1", "1"])))


def test_opo_of_a_group_whose_responses_have_no_actions() -> None:
    assert_array_equal(advantages("opo", batch([1.0, 2.0, 5.0, 1.0], [0, 0, 1, 1], ["0", "", "1", "000"])), np.zeros(5))


def test_max_rl_without_success_and_below_zero() -> None:
    """All failed: nothing to divide by. Of 8 with one success the success weighs 7, as many as the failures."""
    assert_array_equal(advantages("max_rl", batch([0, 0, 1, 0], [0, 0, 1, 1], ["1"] * 4)), [0, 0, 1, -1])
    assert_array_equal(advantages("max_rl", batch([1] + [0] * 7, [0] * 8, ["1"] * 8)), [7] + [-1] * 7)
    tiny = advantages("max_rl", batch([1e-38, 0.0], [0, 0], ["1", "1"]))
    assert_allclose(tiny, [1, -1])
    with pytest.raises(ConfigError, match=r"^algo.advantage.estimator = max_rl divides .* lowest .* is -0\.5: return"):
        advantages("max_rl", batch([1.0, -0.5], [0, 0], ["1", "1"]))


def test_no_std_norm_keeps_the_mean_and_divides_by_nothing() -> None:
    rewards = ([3, 1, 1, 4], [0, 0, 1, 1], ["11", "1", "101", "1"])
    plain, without = batch(*rewards), batch(*rewards, no_std_norm=True)
    assert_array_equal(advantages("group_norm", without), advantages("reinforce_baseline", plain))
    for name in ("reinforce", "reinforce_baseline"):
        x = advantages(name, plain)
        mean = x[plain.action_mask].mean(dtype=np.float64)
        wanted = np.where(plain.action_mask, x - mean, 0)
        assert_allclose(estimate(find_algorithm(name), without)["advantages"], wanted, rtol=1e-6)
    for name in ("rloo", "dr_grpo", "opo", "max_rl"):
        assert_array_equal(advantages(name, without), advantages(name, plain))


def test_what_is_whitened() -> None:
    inputs = batch([3, 1, 1, 4], [0, 0, 1, 1], ["11", "1", "101", "1"])
    for name, record in built_in().items():
        if record.needs_critic or record.needs_components:
            continue
        plain, found = advantages(name, inputs), estimate(record, inputs)["advantages"]
        assert record.whiten == name.startswith("reinforce"), name
        assert_array_equal(found, whiten(plain, inputs.action_mask) if record.whiten else plain)


responses = st.lists(
    st.tuples(st.floats(-9, 9, width=32), st.integers(0, 3), st.text("01", max_size=5)), min_size=1, max_size=12
)


@settings(max_examples=150, deadline=None)
@given(responses, st.floats(0, 1), st.just(0.0) | st.floats(0.01, 2), st.integers(0, 2**32 - 1))
def test_written_out(drawn: list[tuple[float, int, str]], gamma: float, kl_coef: float, seed: int) -> None:
    """Ragged groups in any order, masks with gaps, empty responses, a KL, in float64 and response by response."""
    every = "".join(mask for _, _, mask in drawn)
    noise = np.random.default_rng(seed).normal(size=len(every)).astype(np.float32)
    kl = np.where([mark == "1" for mark in every], noise, np.float32("nan"))
    of_kl = {"kl": kl, "kl_coef": kl_coef} if kl_coef else {}
    for name in ("reinforce", *GROUPS):
        if name == "max_rl":
            drawn = [(abs(reward), group, mask) for reward, group, mask in drawn]
        rewards, groups, masks = ([row[i] for row in drawn] for i in range(3))
        inputs = batch(rewards, groups, masks, gamma=gamma, **of_kl)  # type: ignore[arg-type]
        wanted: list[float] = []
        for reward, group, mask in drawn:
            mates = [other[0] for other in drawn if other[1] == group]
            tokens = [other[2].count("1") for other in drawn if other[1] == group]
            by_token = math.fsum(t * mate for t, mate in zip(tokens, mates, strict=True)) / max(sum(tokens), 1)
            n, mean = len(mates), math.fsum(mates) / len(mates)
            std = math.sqrt(math.fsum((mate - mean) ** 2 for mate in mates) / max(n - 1, 1))
            others = (math.fsum(mates) - reward) / max(n - 1, 1)
            of_response = {
                "reinforce": reward,
                "reinforce_baseline": reward - mean,
                "dr_grpo": reward - mean,
                "rloo": reward - others if n > 1 else 0.0,
                "group_norm": (reward - mean) / (std + 1e-6),
                "opo": reward - by_token,
                "max_rl": (reward - mean) / mean if mean > 0 else 0.0,
            }[name]
            acted, start = [t for t, mark in enumerate(mask) if mark == "1"], len(wanted)
            earned = [-kl_coef * float(kl[start + t]) if kl_coef else 0.0 for t in acted]
            wanted += [0.0] * len(mask)
            for i, t in enumerate(acted):
                later = [gamma ** (k - i) * earned[k] for k in range(i, len(acted))]
                wanted[start + t] = math.fsum([*later, gamma ** (len(acted) - 1 - i) * of_response])
        assert_allclose(advantages(name, inputs), wanted, rtol=1e-5, atol=1e-5)


# --- aggregation


@pytest.mark.parametrize(
    ("mode", "denominator", "weights"),
    [
        ("token-mean", 3.0, None),
        ("seq-mean-token-mean", 2.0, [0.5, 0.5, 0.5, 1.0]),
        ("seq-mean-token-sum", 2.0, None),
        ("seq-mean-token-sum-norm", 20.0, None),
    ],
)
def test_aggregations_by_hand(mode: str, denominator: float, weights: list[float] | None) -> None:
    """A response of two actions with a gap, one without actions, one of one action."""
    inputs = batch([0, 0, 0], [0, 0, 0], ["101", "", "1"])
    found = loss_weights(mode, inputs.action_mask, inputs.offsets, 10)
    assert found[0] == denominator
    assert (found[1] is None) if weights is None else found[1].tolist() == weights  # type: ignore[union-attr]
