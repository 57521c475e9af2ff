"""What the conductor makes of a correction: columns for the actor's ranks, and none of the actor's with bypass."""

from __future__ import annotations

import math

import numpy as np
import pytest

from slurm_rlhf.algorithms.correction import mask_not_finite
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.roles import algorithm_of
from slurm_rlhf.config.schema import Config
from slurm_rlhf.controller.experience import fill_correction, fill_loss_weights, fill_passes
from slurm_rlhf.records import Experience


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


def test_with_bypass_the_old_log_probs_are_the_engines_and_finite() -> None:
    config, batch = config_of("algo.correction.bypass=true"), experience()
    fill_passes(config, {}, batch)
    assert batch.columns["logprobs"].tolist() == pytest.approx([math.log(0.2), math.log(0.5), 0, math.log(0.5)])
    assert fill_correction(config, batch, AGE) == {}
    assert "correction" not in batch.columns
