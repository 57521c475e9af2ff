"""The columns of weights and the denominator that ranks get with their parts of an optimizer step."""

from __future__ import annotations

import numpy as np
import pytest

from slurm_rlhf.algorithms.methods.ppo import GAE
from slurm_rlhf.config.schema import Config
from slurm_rlhf.controller.loss_weights import fill_loss_weights
from slurm_rlhf.records import Experience


def batch() -> Experience:
    """Responses of two actions with a gap, of none, and of one."""
    lens = np.array([3, 0, 1], dtype=np.int32)
    mask = np.array([True, False, True, True])
    return Experience(lens, lens, np.zeros(8, dtype=np.int32), mask, np.array([1.0, 1.0, -1.0], dtype=np.float32))


@pytest.mark.parametrize(("loss", "mode"), [("gspo", ""), ("sapo", ""), ("ppo", "seq-mean-token-mean")])
def test_the_mean_of_means_is_a_column(loss: str, mode: str) -> None:
    config, made = Config(), batch()
    config.actor.policy_loss_type, config.actor.loss_agg_mode = loss, mode  # type: ignore[assignment]
    assert fill_loss_weights(config, GAE, made) == 2.0
    assert {name: column.tolist() for name, column in made.columns.items()} == {"loss_weights": [0.5, 0.5, 0.5, 1.0]}
    config.actor.entropy_coef = 0.1
    fill_loss_weights(config, GAE, made)
    assert made.columns["entropy_weights"].tolist() == [0.5, 0.5, 0.5, 1.0]


@pytest.mark.parametrize(
    ("mode", "denominator"), [("", 3.0), ("seq-mean-token-sum", 2.0), ("seq-mean-token-sum-norm", 2.0 * 1024)]
)
def test_the_others_are_the_denominator_alone(mode: str, denominator: float) -> None:
    config, made = Config(), batch()
    config.actor.loss_agg_mode, config.actor.entropy_coef = mode, 0.1  # type: ignore[assignment]
    assert fill_loss_weights(config, GAE, made) == denominator
    assert made.columns == {}
