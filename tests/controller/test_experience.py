"""What the conductor makes of rewards, log-probs and values: the keys of the configuration reach the numbers."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from slurm_rlhf.algorithms.registry import find_algorithm
from slurm_rlhf.config.keys import put
from slurm_rlhf.config.schema import Config
from slurm_rlhf.controller.experience import counting, fill_advantages
from slurm_rlhf.records import Experience
from slurm_rlhf.rewards.values import Rewards


def experience(rewards: list[float], lengths: list[int], **columns: list[float]) -> Experience:
    """Responses of these lengths; every token is an action."""
    sizes, total = np.array(lengths, dtype=np.int32), sum(lengths)
    ids, mask = np.zeros(len(lengths) + total, dtype=np.int32), np.ones(total, dtype=np.bool_)
    made = {name: np.array(column, dtype=np.float32) for name, column in columns.items()}
    return Experience(np.ones_like(sizes), sizes, ids, mask, np.array(rewards, dtype=np.float32), made)


def config(estimator: str, samples: int, **keys: object) -> Config:
    made = Config()
    made.algo.advantage.estimator, made.rollout.n_samples_per_prompt = estimator, samples
    for name, value in keys.items():
        put(made, name.replace("__", "."), value)
    return made


def filled(config: Config, batch: Experience, judged: Rewards | None = None, kl_coef: float = 0.0) -> dict[str, float]:
    algorithm = find_algorithm(config.algo.advantage.estimator)
    return fill_advantages(config, algorithm, batch, judged or Rewards(batch.rewards), kl_coef, None)


def test_the_lambda_of_the_critic() -> None:
    """lambda 0 for the policy, 1 for the critic, which then learns the reward at every token."""
    batch = experience([5.0], [3], values=[1.0, 2.0, 4.0])
    keys = {"algo__advantage__lambd": 0.0, "algo__advantage__lambd_critic": 1.0, "algo__advantage__no_whitening": True}
    metrics = filled(config("gae", 1, **keys), batch)
    assert_array_equal(batch.columns["advantages"], [1, 2, 1])
    assert_array_equal(batch.columns["returns"], [5, 5, 5])
    assert (metrics["value"], metrics["return"]) == (pytest.approx(7 / 3), 5)
    del keys["algo__advantage__lambd_critic"]
    filled(config("gae", 1, **keys), batch)
    assert_array_equal(batch.columns["returns"], [2, 4, 5])


def test_no_std_norm() -> None:
    batch = experience([4.0, 0.0], [1, 3])
    filled(config("reinforce_baseline", 2, algo__advantage__no_std_norm=True), batch)
    assert_allclose(batch.columns["advantages"], [3, -1, -1, -1])
    filled(config("group_norm", 2, algo__advantage__no_std_norm=True), batch)
    assert_array_equal(batch.columns["advantages"], [2, -2, -2, -2])


def test_components_reach_gdpo_with_their_weights() -> None:
    judged = Rewards(np.zeros(2, dtype=np.float32), components={"a": np.float32([20, 0]), "b": np.float32([0, 4])})
    keys = {"gdpo_reward_keys": ["b", "a"], "gdpo_reward_weights": [1.0, 0.1], "no_std_norm": True}
    made = config("gdpo", 2, **{f"algo__advantage__{name}": value for name, value in keys.items()})
    batch = experience([0.0, 0.0], [1, 1])
    metrics = filled(made, batch, judged)
    assert_allclose(batch.columns["advantages"], [-2 + 0.5, 2 - 0.5])
    assert metrics["reward_clipped"] == 0.25  # one component of one response, at reward.clip_range = [-10, 10]


def test_shuffled_rewards_keep_what_belongs_to_a_response_together() -> None:
    """The control experiment: scores and components go where the rewards go, and what is logged stays."""
    numbers = np.arange(50, dtype=np.float32)
    plain = Rewards(numbers, numbers + 100, {"log": numbers[:1]}, {"a": numbers - 1})
    assert counting(Config(), plain, 3) is plain
    mixed = counting(config("gae", 1, reward__shuffle=True, train__seed=7), plain, 3)
    assert sorted(mixed.rewards) == numbers.tolist() != mixed.rewards.tolist()
    assert_array_equal(mixed.rewards, np.random.default_rng([7, 3]).permutation(numbers))
    assert mixed.scores is not None
    assert_array_equal(mixed.scores - 100, mixed.rewards)
    assert_array_equal(mixed.components["a"] + 1, mixed.rewards)
    assert mixed.extra_logs is plain.extra_logs
