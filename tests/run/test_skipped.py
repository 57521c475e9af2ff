"""Responses without a reward: nothing is trained on them, and the others to the prompt are compared without them."""

from __future__ import annotations

import numpy as np

from slurm_rlhf.algorithms.registry import find_algorithm
from slurm_rlhf.config.schema import Config
from slurm_rlhf.records import Experience
from slurm_rlhf.rewards.scored import Rewards
from slurm_rlhf.run.experience import fill_advantages, without_skipped

LENGTHS = np.array([2, 1, 2, 2], dtype=np.int32)


def config() -> Config:
    made = Config()
    made.algo.advantage.estimator, made.rollout.n_samples_per_prompt = "reinforce_baseline", 2
    made.algo.advantage.no_whitening = True
    return made


def experience() -> Experience:
    """Two prompts with two responses each; every token is an action."""
    mask, rewards = np.ones(LENGTHS.sum(), dtype=np.bool_), np.zeros(len(LENGTHS), dtype=np.float32)
    return Experience(np.ones_like(LENGTHS), LENGTHS, np.zeros(11, dtype=np.int32), mask, rewards, {}, [])


def test_a_skipped_response_is_not_trained_on_and_changes_no_baseline() -> None:
    batch, skipped = experience(), np.array([False, True, False, True])
    judged = Rewards(np.float32([1, 0, 3, 0]), components={"a": np.float32([2, 9, 4, 9])}, skipped=skipped)
    found = without_skipped(config(), batch, judged)
    assert found.rewards.tolist() == [1, 1, 3, 3]  # the mean of the others to the prompt
    assert found.components["a"].tolist() == [2, 2, 4, 4]
    assert batch.action_mask.tolist() == [True, True, False, True, True, False, False]
    fill_advantages(config(), find_algorithm("reinforce_baseline"), batch, found, 0.0, None)
    assert batch.columns["advantages"].tolist() == [0.0] * 7


def test_without_skipped_responses_nothing_changes() -> None:
    batch, judged = experience(), Rewards(np.float32([1, 2, 3, 4]), skipped=np.zeros(4, np.bool_))
    assert without_skipped(config(), batch, judged) is judged
    assert batch.action_mask.all()
