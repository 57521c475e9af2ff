"""The way from responses to experience: rewards, corrections, weights of the loss, and optimizer steps."""

from __future__ import annotations

import math
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from steps import make_step

from slurm_rlhf.algorithms.correction import COLUMN, mask_not_finite
from slurm_rlhf.algorithms.layout import ROWS
from slurm_rlhf.algorithms.losses import KLController
from slurm_rlhf.algorithms.methods.ppo import GAE
from slurm_rlhf.algorithms.registry import find_algorithm
from slurm_rlhf.algorithms.reward_shaping import FixedScale
from slurm_rlhf.config.keys import put
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.roles import algorithm_of
from slurm_rlhf.config.schema import Config
from slurm_rlhf.records import Experience, Trajectory, VersionSpan, pack
from slurm_rlhf.rewards.scored import Rewards
from slurm_rlhf.run.experience import fill_advantages, fill_correction, fill_loss_weights, fill_passes, loss_mask
from slurm_rlhf.run.startup import optimizer_steps
from slurm_rlhf.run.step_metrics import agreement_metrics
from slurm_rlhf.run.update import Trained, update_metrics
from slurm_rlhf.trainer.trainer import Schedule, learning_rate
from slurm_rlhf.wire.calls import TrainAnswer, TrainBatch


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


@pytest.mark.parametrize(
    ("estimator", "keys", "rewards", "lengths", "expected"),
    [
        ("reinforce", {"gamma": 0.5, "no_whitening": True}, [4.0], [3], [1, 2, 4]),
        ("reinforce_baseline", {"no_std_norm": True}, [4.0, 0.0], [1, 3], [3, -1, -1, -1]),
        ("group_norm", {"no_std_norm": True}, [4.0, 0.0], [1, 3], [2, -2, -2, -2]),
    ],
)
def test_keys_of_advantages(
    estimator: str, keys: dict[str, object], rewards: list[float], lengths: list[int], expected: list[float]
) -> None:
    batch = experience(rewards, lengths)
    made = config(estimator, len(rewards), **{f"algo__advantage__{name}": value for name, value in keys.items()})
    metrics = filled(made, batch)
    assert_allclose(batch.columns["advantages"], expected)
    # Without a reference there is no KL: a 0 would be read as a policy that stays where it was.
    assert not {"kl", "kl_coef"} & metrics.keys()


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
    assert_array_equal(batch.columns["advantages"], [2.25, 2.25, -2.25, -2.25, -2.25, -2.25])  # rewards 3 - 1, -0.5 - 2
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
    assert_allclose(batch.columns["advantages"], [-1, -1, 1, 1])  # rewards -1 - 1 and 1 - 1, whitened


def test_an_episode_is_too_long_by_its_turns_and_observations_together() -> None:
    """The limit is data.max_len, of which the prompt has a token; rollout.max_new_tokens is that of one turn."""
    made = config("dr_grpo", 3, env__path="env.py", data__max_len=11, rollout__max_new_tokens=2)
    made.reward.overlong_buffer_len = 4
    batch = experience([3.0, 3.0, 3.0], [6, 8, 10])
    batch.action_mask[[2, 3, 8, 9, 16]] = False
    metrics = filled(made, batch)
    assert {name: metrics[name] for name in metrics if name.startswith("shaping/")} == {
        "shaping/overlong": pytest.approx(2 / 3),
        "shaping/reward": 2.5,
    }
    assert_array_equal(batch.columns["advantages"][[0, 6, 14]], [0.5, 0, -0.5])


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
    assert batch.action_mask.all()  # log-probs are compared on all of them
    made.rollout.mask_truncated = False
    assert loss_mask(made, batch).all()


def test_a_batch_of_truncated_responses_only() -> None:
    made = config("gae", 1, rollout__mask_truncated=True)
    batch = experience([1.0, 2.0], [2, 1], reasons=["length", "length"], values=[1.0, 2.0, 3.0])
    metrics = filled(made, batch)
    assert_array_equal(batch.columns["advantages"], [0, 0, 0])
    assert (metrics["return"], metrics["value"], metrics["shaping/masked"]) == (0, 0, 1)


def config_of(*keys: str) -> Config:
    return load_config(None, [f"--{key}" for key in keys])


def unlike() -> Experience:
    """Responses of 3 and 1 tokens, whose ratios are 4, 1, unknown and 1."""
    actor, engine = ([math.log(p) for p in given] for given in ([0.8, 0.5, 0.5, 0.5], [0.2, 0.5, math.nan, 0.5]))
    made = experience([0.0, 0.0], [3, 1], logprobs=actor, rollout_logprobs=engine, advantages=[1.0] * 4)
    assert mask_not_finite(made) == 1
    return made


AGE = np.zeros(4, dtype=np.int32)


@pytest.mark.parametrize(
    ("mode", "denominator", "aggregated"),
    [("token-mean", 3, [1, 1, 1, 1]), ("seq-mean-token-mean", 2, [0.5, 0.5, 0.5, 1])],
)
def test_weights_are_those_of_the_aggregation_times_the_correction(
    mode: str, denominator: float, aggregated: list[float]
) -> None:
    config = config_of("algo.correction.preset=tis", f"actor.loss_agg_mode={mode}", "actor.entropy_coef=0.1")
    batch = unlike()
    metrics = fill_correction(config, batch, AGE)
    assert metrics["correction/truncated"] == pytest.approx(1 / 3)
    assert fill_loss_weights(config, algorithm_of(config), batch, 0.0) == denominator
    assert batch.columns["loss_weights"].tolist() == pytest.approx((np.array([2, 1, 0, 1]) * aggregated).tolist())
    assert "correction" not in batch.columns
    # The bonus is of the policy as it is now.
    assert batch.columns.get("entropy_weights", np.ones(4)).tolist() == aggregated


def test_measured_but_not_corrected() -> None:
    config, batch = config_of(), unlike()
    metrics = fill_correction(config, batch, AGE)
    assert metrics["correction/log_rho_max"] == pytest.approx(math.log(4))
    assert fill_loss_weights(config, algorithm_of(config), batch, 0.0) == 3
    assert not {"loss_weights", "correction"} & set(batch.columns)
    # With bypass the old log-probs are the engine's, and finite.
    fill_passes(config_of("algo.correction.bypass=true"), {}, batch)
    assert batch.columns["logprobs"].tolist() == pytest.approx([math.log(0.2), math.log(0.5), 0, math.log(0.5)])
    assert "correction" not in batch.columns


def test_tokens_that_are_dropped_stay_in_the_denominator() -> None:
    config, batch = config_of("algo.correction.preset=icepop", "algo.correction.thresholds=0.5,2"), unlike()
    fill_correction(config, batch, AGE)
    assert fill_loss_weights(config, algorithm_of(config), batch, 0.0) == 3
    assert batch.columns["loss_weights"].tolist() == [0, 1, 0, 1]


def test_a_response_that_the_actor_has_left_behind_is_dropped_beyond_the_delta() -> None:
    """Its advantage is negative: the mean of log(engine / actor) is log(1.8) = 0.59 in the second response."""
    for delta, kept in ((0.5, 0), (0.6, 1)):
        config, batch = config_of(f"algo.correction.off_policy_delta={delta}"), unlike()
        batch.columns["rollout_logprobs"][3] = math.log(0.9)
        batch.columns["advantages"][:] = -1
        metrics = fill_correction(config, batch, AGE)
        assert batch.columns["correction"].tolist() == [1, 1, 0, kept]  # the third is no action
        assert metrics["correction/dropped"] == pytest.approx((1 - kept) / 3)


class MovingActor:
    """A role of one rank whose policy gives every token a tenth more after each optimizer step."""

    world = 1
    layout = ROWS

    def __init__(self) -> None:
        self.steps: list[list[int]] = []

    def start_each(self, method: Any, batches: list[TrainBatch], /) -> list[Future[TrainAnswer]]:
        (batch,), answer = batches, Future[TrainAnswer]()
        passed = batch.experience.columns["rollout_logprobs"] + np.float32(0.5 + 0.1 * len(self.steps))
        self.steps.append(batch.experience.response_lens.tolist())
        answer.set_result(TrainAnswer({"lr": 0.0, "grad_norm": 1.0, "ratio": 1.0, "approx_kl": 0.0}, passed))
        return [answer]


def test_with_bypass_the_first_optimizer_step_measures_its_part_of_the_batch_age_by_age() -> None:
    """Four responses have two tokens each, the first of them an update older; later steps have moved on."""
    config = config_of("algo.correction.bypass=true", "rollout.batch_size=4")
    config.train.batch_size, config.algo.kl.init_coef = 2, 0.0
    prompt, spans = np.arange(3, dtype=np.int32), [VersionSpan(0, 1, 4), VersionSpan(1, 2, 5)]
    engine, mask = np.array([-1.0, -2.0], dtype=np.float32), np.ones(2, dtype=np.bool_)
    trajectories = [Trajectory(i, 0, prompt, prompt[:2], engine, mask, "stop", "", spans) for i in range(4)]
    batch = pack(trajectories, [0.0] * 4)
    batch.columns["advantages"] = np.ones(8, dtype=np.float32)
    actor = MovingActor()
    fill_passes(config, {}, batch)
    step = make_step(config, {"actor": actor}, kl=KLController(0.0, 0.0, 1))
    config.vllm.sync_mode = "inflight"  # no engines are asked
    metrics = step.update(1, trajectories, batch, {"kl": 0.0}, 5)
    assert actor.steps == [[2, 2], [2, 2]]
    for name in ("correction", "correction/age_0", "correction/age_1"):
        assert metrics[f"{name}/log_rho_mean"] == metrics[f"{name}/log_rho_max"] == pytest.approx(0.5)
        assert metrics[f"{name}/k1"] == pytest.approx(-0.5)
        assert metrics[f"{name}/truncated"] == metrics[f"{name}/dropped"] == 0
    assert metrics["rollout_logprob_diff"] == pytest.approx(0.5)
    assert metrics["stale_logprob_diff"] == pytest.approx(0.5)
    assert batch.columns["logprobs"].tolist() == batch.columns["rollout_logprobs"].tolist()


def test_tokens_of_older_policies_have_a_distance_of_their_own() -> None:
    """Ages 2, 2, 1 and 0, 1, 1, 0, of which the last is masked; distances by hand."""
    spans = [
        [VersionSpan(0, 2, 3), VersionSpan(2, 3, 4)],
        [VersionSpan(0, 1, 5), VersionSpan(1, 3, 4), VersionSpan(3, 4, 5)],
    ]
    engine, mask = [[3.0, 3.0, 0.0], [9.0, 0.0, 4.0, 8.0]], [[True] * 3, [True, True, True, False]]
    prompt, found = np.arange(3, dtype=np.int32), []
    for row, (said, acted) in enumerate(zip(engine, mask, strict=True)):
        ids, logprobs = np.zeros(len(said), dtype=np.int32), np.array(said, dtype=np.float32)
        found.append(Trajectory(row, 0, prompt, ids, logprobs, np.array(acted), "stop", "", spans[row]))
    batch = pack(found, [0.0, 0.0])
    batch.columns["logprobs"] = np.zeros(7, dtype=np.float32)
    assert agreement_metrics(config_of("vllm.sync_mode=inflight"), found, batch, 5) == {
        "rollout_logprob_diff": 9,
        "rollout_logprob_diff_max": 9,
        "stale_logprob_diff": 2,
    }


def batch() -> Experience:
    """Responses of two actions with a gap, of none, and of one."""
    made = experience([1.0, 1.0, -1.0], [3, 0, 1])
    made.action_mask[1] = False
    return made


@pytest.mark.parametrize(("loss", "mode"), [("gspo", ""), ("sapo", ""), ("ppo", "seq-mean-token-mean")])
def test_the_mean_of_means_is_a_column(loss: str, mode: str) -> None:
    config, made = Config(), batch()
    config.actor.policy_loss_type, config.actor.loss_agg_mode = loss, mode  # type: ignore[assignment]
    assert fill_loss_weights(config, GAE, made, 0.01) == 2.0
    assert {name: column.tolist() for name, column in made.columns.items()} == {"loss_weights": [0.5, 0.5, 0.5, 1.0]}
    config.actor.entropy_coef = 0.1
    fill_loss_weights(config, GAE, made, 0.01)
    assert made.columns["entropy_weights"].tolist() == [0.5, 0.5, 0.5, 1.0]


@pytest.mark.parametrize(
    ("mode", "denominator"), [("", 3.0), ("seq-mean-token-sum", 2.0), ("seq-mean-token-sum-norm", 2.0 * 1024)]
)
def test_the_others_are_the_denominator_alone(mode: str, denominator: float) -> None:
    config, made = Config(), batch()
    config.actor.loss_agg_mode, config.actor.entropy_coef = mode, 0.1  # type: ignore[assignment]
    assert fill_loss_weights(config, GAE, made, 0.01) == denominator
    assert made.columns == {}


def test_kl_and_likelihood_have_weights_of_their_own() -> None:
    config, made = Config(), batch()
    config.algo.kl.use_loss, config.actor.nll_coef = True, 0.1
    assert fill_loss_weights(config, GAE, made, 0.25) == 3.0
    assert made.columns["kl_weights"].tolist() == [0.25] * 4
    assert made.columns["nll_weights"].tolist() == [0.5, 0, 0.5, 0]
    assert "loss_weights" not in made.columns
    config.actor.loss_agg_mode = "seq-mean-token-mean"
    fill_loss_weights(config, GAE, made, 0.25)
    assert made.columns["kl_weights"].tolist() == [0.125, 0.125, 0.125, 0.25]
    # A correction is of the policy loss alone.
    config.actor.entropy_coef = 0.1
    made.columns[COLUMN] = np.array([2.0, 0.0, 0.0, 1.0], dtype=np.float32)
    fill_loss_weights(config, GAE, made, 0.25)
    assert made.columns["loss_weights"].tolist() == [1.0, 0.0, 0.0, 1.0]
    assert made.columns["entropy_weights"].tolist() == [0.5, 0.5, 0.5, 1.0]
    assert made.columns["kl_weights"].tolist() == [0.125, 0.125, 0.125, 0.25]
    assert made.columns["nll_weights"].tolist() == [0.5, 0, 0.5, 0]
    assert all(column.dtype == np.float32 for column in made.columns.values())


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3+"])
def test_the_kl_is_in_the_loss_or_in_the_reward_and_measured_in_both(estimator: str) -> None:
    config, found = Config(), {}
    config.algo.kl.estimator = estimator  # type: ignore[assignment]
    config.algo.advantage.no_whitening, config.algo.advantage.lambd = True, 1.0
    for use_loss in (False, True):
        made = batch()
        made.columns |= {name: np.zeros(4, dtype=np.float32) for name in ("logprobs", "values")}
        made.columns["ref_logprobs"] = np.array([0, math.nan, -1, -2], dtype=np.float32)
        config.algo.kl.use_loss = use_loss
        metrics = fill_advantages(config, GAE, made, Rewards(made.rewards), 0.25, None)
        assert metrics["kl_coef"] == 0.25
        found[use_loss] = made.columns["advantages"].tolist(), metrics["kl"]
    of_token = {"k2": [0.5, 2.0]}.get(estimator, [math.exp(-1), 1 + math.exp(-2)])
    assert found[True] == ([1, 0, 1, -1], pytest.approx(sum(of_token) / 3))
    assert found[False][0] == pytest.approx([1 - of_token[0] / 4, 0, 1 - of_token[0] / 4, -1 - of_token[1] / 4])
    assert found[False][1] == found[True][1]


def test_metrics_of_terms_are_means() -> None:
    """The KL over all tokens of the step; the likelihood over those of good responses, which its weights divide by."""
    answers = [{"kl_loss": 3.0, "nll_loss": 0.5}, {"kl_loss": 1.0, "nll_loss": 0.25}]
    steps = [Trained("actor", 8.0, answers), Trained("actor", 4.0, answers)]
    assert update_metrics(steps) == {"kl_loss": 0.75, "nll_loss": 0.75}


STEPS = 40


@pytest.mark.parametrize("kind", ["linear", "cosine"])
@pytest.mark.parametrize(("frozen", "epochs"), [(0, 1), (20, 1), (20, 3), (39, 2)])
def test_the_actor_ends_at_the_least_share_of_the_peak_however_long_it_was_frozen(
    kind: str, frozen: int, epochs: int
) -> None:
    config = Config()
    config.critic.freezing_steps, config.train.max_epochs = frozen, epochs
    config.rollout.batch_size, config.rollout.n_samples_per_prompt, config.train.batch_size = 64, 4, 128
    actor, critic = (optimizer_steps(config, role, STEPS) for role in ("actor", "critic"))
    assert critic == STEPS * epochs * 2
    # An engine counts the steps that it takes: the actor's first one comes behind the frozen ones.
    taken = (STEPS - frozen) * epochs * 2
    schedule = Schedule(kind, 1e-3, actor, 0.0, 0.1)
    assert learning_rate(0, schedule) == pytest.approx(1e-3)
    assert learning_rate(taken - 1, schedule) == pytest.approx(1e-4)
    assert learning_rate(taken - 2, schedule) > 1e-4
    config.critic.freezing_steps = STEPS + 10  # a run that is frozen to its end has no schedule
    assert optimizer_steps(config, "actor", STEPS) == 0
