"""What the conductor makes of a correction: columns for the actor's ranks, and none of the actor's with bypass."""

from __future__ import annotations

import math
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from steps import make_step

from slurm_rlhf.algorithms.correction import mask_not_finite
from slurm_rlhf.algorithms.policy_distance import KLController
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.roles import algorithm_of
from slurm_rlhf.config.schema import Config
from slurm_rlhf.records import Experience, Trajectory, VersionSpan, pack
from slurm_rlhf.run.experience import fill_correction, fill_loss_weights, fill_passes
from slurm_rlhf.run.step_metrics import agreement_metrics
from slurm_rlhf.wire.calls import TrainAnswer, TrainBatch


def config_of(*keys: str) -> Config:
    return load_config(None, [f"--{key}" for key in keys])


def experience() -> Experience:
    """Responses of 3 and 1 tokens, whose ratios are 4, 1, unknown and 1."""
    lens = np.array([3, 1], dtype=np.int32)
    columns = {
        "logprobs": np.log([0.8, 0.5, 0.5, 0.5]).astype(np.float32),
        "rollout_logprobs": np.array([math.log(0.2), math.log(0.5), math.nan, math.log(0.5)], dtype=np.float32),
        "advantages": np.ones(4, dtype=np.float32),
    }
    made = Experience(lens, lens, np.zeros(8, np.int32), np.ones(4, np.bool_), np.zeros(2, np.float32), columns)
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
    batch = experience()
    metrics = fill_correction(config, batch, AGE)
    assert metrics["correction/truncated"] == pytest.approx(1 / 3)
    assert fill_loss_weights(config, algorithm_of(config), batch, 0.0) == denominator
    expected = np.array([2, 1, 0, 1]) * aggregated
    assert batch.columns["loss_weights"].tolist() == pytest.approx(expected.tolist())
    assert "correction" not in batch.columns
    # The bonus is of the policy as it is now.
    assert batch.columns.get("entropy_weights", np.ones(4)).tolist() == aggregated


def test_measured_but_not_corrected() -> None:
    config, batch = config_of(), experience()
    metrics = fill_correction(config, batch, AGE)
    assert metrics["correction/log_rho_max"] == pytest.approx(math.log(4))
    assert fill_loss_weights(config, algorithm_of(config), batch, 0.0) == 3
    assert not {"loss_weights", "correction"} & set(batch.columns)


def test_tokens_that_are_dropped_stay_in_the_denominator() -> None:
    config, batch = config_of("algo.correction.preset=icepop", "algo.correction.thresholds=0.5,2"), experience()
    fill_correction(config, batch, AGE)
    assert fill_loss_weights(config, algorithm_of(config), batch, 0.0) == 3
    assert batch.columns["loss_weights"].tolist() == [0, 1, 0, 1]


def test_a_response_that_the_actor_has_left_behind_is_dropped_beyond_the_delta() -> None:
    """Where its advantage is negative: the mean of log(engine / actor) is log(1.8) = 0.59 in the second response."""
    for delta, kept in ((0.5, 0), (0.6, 1)):
        config, batch = config_of(f"algo.correction.off_policy_delta={delta}"), experience()
        batch.columns["rollout_logprobs"][3] = math.log(0.9)
        batch.columns["advantages"][:] = -1
        metrics = fill_correction(config, batch, AGE)
        assert batch.columns["correction"].tolist() == [1, 1, 0, kept]  # the third is no action
        assert metrics["correction/dropped"] == pytest.approx((1 - kept) / 3)


def test_with_bypass_the_old_log_probs_are_the_engines_and_finite() -> None:
    config, batch = config_of("algo.correction.bypass=true"), experience()
    fill_passes(config, {}, batch)
    assert batch.columns["logprobs"].tolist() == pytest.approx([math.log(0.2), math.log(0.5), 0, math.log(0.5)])
    assert "correction" not in batch.columns


class MovingActor:
    """A role of one rank whose policy gives every token a tenth more after each optimizer step."""

    world = 1

    def __init__(self) -> None:
        self.steps: list[list[int]] = []

    def start_each(self, method: Any, batches: list[TrainBatch], /) -> list[Future[TrainAnswer]]:
        (batch,), answer = batches, Future[TrainAnswer]()
        passed = batch.experience.columns["rollout_logprobs"] + np.float32(0.5 + 0.1 * len(self.steps))
        self.steps.append(batch.experience.response_lens.tolist())
        answer.set_result(TrainAnswer({"lr": 0.0, "grad_norm": 1.0, "ratio": 1.0, "approx_kl": 0.0}, passed))
        return [answer]


def test_with_bypass_the_first_optimizer_step_measures_its_part_of_the_batch_age_by_age() -> None:
    """Of four responses of two tokens, the first token of each an update older; later steps have moved on."""
    config = config_of("algo.correction.bypass=true", "rollout.batch_size=4")
    config.train.batch_size, config.algo.kl.init_coef = 2, 0.0
    prompt, spans = np.arange(3, dtype=np.int32), [VersionSpan(0, 1, 4), VersionSpan(1, 2, 5)]
    engine, mask = np.array([-1.0, -2.0], dtype=np.float32), np.ones(2, dtype=np.bool_)
    tokens = np.zeros(2, dtype=np.int32)
    trajectories = [Trajectory(i, 0, prompt, tokens, engine, mask, "stop", "", spans) for i in range(4)]
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
