"""What the conductor makes of rewards, log-probs and values: the keys of the configuration reach the numbers."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from slurm_rlhf.algorithms.registry import find_algorithm
from slurm_rlhf.config.keys import put
from slurm_rlhf.config.schema import Config
from slurm_rlhf.controller.experience import fill_advantages
from slurm_rlhf.records import Experience


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


def filled(config: Config, batch: Experience, kl_coef: float = 0.0) -> dict[str, float]:
    return fill_advantages(config, find_algorithm(config.algo.advantage.estimator), batch, kl_coef, None)


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
