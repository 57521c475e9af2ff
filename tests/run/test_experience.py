"""What the conductor makes of rewards, log-probs and values: the keys of the configuration reach the numbers."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from slurm_rlhf.algorithms.registry import find_algorithm
from slurm_rlhf.algorithms.reward_shaping import FixedScale
from slurm_rlhf.config.keys import put
from slurm_rlhf.config.schema import Config
from slurm_rlhf.records import Experience
from slurm_rlhf.rewards.function import Rewards
from slurm_rlhf.run.experience import counting, fill_advantages, loss_mask


def experience(
    rewards: list[float], lengths: list[int], reasons: list[str] | None = None, **columns: list[float]
) -> Experience:
    """Responses of these lengths, which ended for `reasons`; every token is an action."""
    sizes, total = np.array(lengths, dtype=np.int32), sum(lengths)
    ids, mask = np.zeros(len(lengths) + total, dtype=np.int32), np.ones(total, dtype=np.bool_)
    made = {name: np.array(column, dtype=np.float32) for name, column in columns.items()}
    return Experience(np.ones_like(sizes), sizes, ids, mask, np.array(rewards, dtype=np.float32), made, reasons or [])


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


def test_gamma_discounts_the_reward_of_the_last_token() -> None:
    batch = experience([4.0], [3])
    filled(config("reinforce", 1, algo__advantage__gamma=0.5, algo__advantage__no_whitening=True), batch)
    assert_array_equal(batch.columns["advantages"], [1, 2, 4])


def test_no_std_norm() -> None:
    batch = experience([4.0, 0.0], [1, 3])
    filled(config("reinforce_baseline", 2, algo__advantage__no_std_norm=True), batch)
    assert_allclose(batch.columns["advantages"], [3, -1, -1, -1])
    filled(config("group_norm", 2, algo__advantage__no_std_norm=True), batch)
    assert_array_equal(batch.columns["advantages"], [2, -2, -2, -2])


def test_without_a_reference_there_is_no_kl() -> None:
    """A 0 would be read as a policy that stays where it was."""
    assert not {"kl", "kl_coef"} & filled(config("reinforce", 2), experience([4.0, 0.0], [1, 3])).keys()


def test_components_reach_gdpo_with_their_weights() -> None:
    judged = Rewards(np.zeros(2, dtype=np.float32), components={"a": np.float32([20, 0]), "b": np.float32([0, 4])})
    keys = {"gdpo_reward_keys": ["b", "a"], "gdpo_reward_weights": [1.0, 0.1], "no_std_norm": True}
    made = config("gdpo", 2, **{f"algo__advantage__{name}": value for name, value in keys.items()})
    batch = experience([0.0, 0.0], [1, 1])
    metrics = filled(made, batch, judged)
    assert_allclose(batch.columns["advantages"], [-2 + 0.5, 2 - 0.5])
    assert metrics["reward_clipped"] == 0.25  # one component of one response, at reward.clip_range = [-10, 10]


def test_penalties_come_before_the_comparison_and_after_the_normalisation() -> None:
    """reward in the metrics is another's; the clip is the last."""
    keys = {"overlong_buffer_len": 4, "overlong_penalty_factor": 2.0, "stop_properly_penalty_coef": -0.5}
    made = config("dr_grpo", 2, rollout__max_new_tokens=4, **{f"reward__{name}": key for name, key in keys.items()})
    batch = experience([3.0, 3.0], [2, 4], reasons=["stop", "length"])
    metrics = filled(made, batch)
    assert_array_equal(batch.columns["advantages"], [2.25, 2.25, -2.25, -2.25, -2.25, -2.25])  # of 3 - 1 and -0.5 - 2
    assert_array_equal(batch.rewards, [3, 3])
    wanted = {"shaping/cut_off": 0.5, "shaping/overlong": 1.0, "shaping/reward": -0.25}
    assert {name: metrics[name] for name in metrics if name.startswith("shaping/")} == wanted
    made.reward.clip_range = [0.0, 1.0]
    assert filled(made, batch)["reward_clipped"] == 1.0
    assert_array_equal(batch.columns["advantages"], [0.5, 0.5, -0.5, -0.5, -0.5, -0.5])
    batch = experience([1.0, 5.0], [2, 2], reasons=["stop", "stop"])
    made.reward.clip_range = [-10.0, 10.0]
    scale = FixedScale(3.0, 2.0)
    fill_advantages(made, find_algorithm("reinforce"), batch, Rewards(batch.rewards), 0.0, scale)
    assert_allclose(batch.columns["advantages"], [-1, -1, 1, 1])  # of -1 - 1 and 1 - 1, whitened


def test_correct_is_what_the_scores_say_and_without_them_the_rewards() -> None:
    made = config("reinforce", 2, reward__length_penalty_coef=1.0, algo__advantage__no_whitening=True)
    rewards = np.float32([0.0, 2.0])
    for judged, wanted in (
        (Rewards(rewards), [0.0, 2.0 - 0.5]),
        (Rewards(rewards, np.float32([1, 0])), [0.5, 2.0 - 0.5]),
    ):
        batch = experience([0.0, 2.0], [1, 3], reasons=["stop", "stop"])
        metrics = filled(made, batch, judged)
        assert_allclose(batch.columns["advantages"][[0, 1]], wanted)
        assert metrics["shaping/length"] == 0.5


@pytest.mark.parametrize("reason", ["length", "repetition"])
def test_truncated_responses_leave_the_loss_and_stay_in_the_baseline(reason: str) -> None:
    made = config("reinforce_baseline", 2, rollout__mask_truncated=True)
    kl = {"logprobs": [0.0] * 4, "ref_logprobs": [-1.0] * 4}
    batch = experience([1.0, 0.0], [1, 3], reasons=["stop", reason], **kl)
    assert loss_mask(made, batch).tolist() == [True, False, False, False]
    metrics = filled(made, batch)
    assert_array_equal(batch.columns["advantages"], [0, 0, 0, 0])  # whitened over one token
    made.algo.advantage.no_whitening = True
    filled(made, batch)
    assert_array_equal(batch.columns["advantages"], [0.5, 0, 0, 0])
    assert (metrics["shaping/masked"], metrics["kl"]) == (0.75, 2.0)  # the KL is measured on all of them
    made.algo.advantage.estimator = "opo"
    filled(made, batch)
    assert_array_equal(batch.columns["advantages"], [0.75, 0, 0, 0])  # the baseline weighs all four tokens
    assert batch.action_mask.all()  # what compares log-probs goes on with all of them
    made.rollout.mask_truncated = False
    assert loss_mask(made, batch).all()


def test_a_batch_of_truncated_responses_only() -> None:
    made = config("gae", 1, rollout__mask_truncated=True)
    batch = experience([1.0, 2.0], [2, 1], reasons=["length", "length"], values=[1.0, 2.0, 3.0])
    metrics = filled(made, batch)
    assert_array_equal(batch.columns["advantages"], [0, 0, 0])
    assert (metrics["return"], metrics["value"], metrics["shaping/masked"]) == (0, 0, 1)


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
