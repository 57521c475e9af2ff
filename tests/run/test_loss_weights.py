"""The columns of weights and the denominator that ranks get with their parts of an optimizer step."""

from __future__ import annotations

import math

import numpy as np
import pytest

from slurm_rlhf.algorithms.correction import COLUMN
from slurm_rlhf.algorithms.methods.ppo import GAE
from slurm_rlhf.config.schema import Config
from slurm_rlhf.records import Experience
from slurm_rlhf.rewards.function import Rewards
from slurm_rlhf.run.experience import fill_advantages, fill_loss_weights
from slurm_rlhf.run.update import Trained, update_metrics


def batch() -> Experience:
    """Responses of two actions with a gap, of none, and of one."""
    lens = np.array([3, 0, 1], dtype=np.int32)
    mask = np.array([True, False, True, True])
    return Experience(lens, lens, np.zeros(8, dtype=np.int32), mask, np.array([1.0, 1.0, -1.0], dtype=np.float32))


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
    metrics = update_metrics([Trained("actor", 8.0, answers), Trained("actor", 4.0, answers)])
    assert metrics == {"kl_loss": 0.75, "nll_loss": 0.75}


def test_a_correction_is_of_the_policy_loss_alone() -> None:
    config, made = Config(), batch()
    config.algo.kl.use_loss, config.actor.nll_coef, config.actor.entropy_coef = True, 0.1, 0.1
    config.actor.policy_loss_type = "gspo"
    made.columns[COLUMN] = np.array([2.0, 0.0, 0.0, 1.0], dtype=np.float32)
    fill_loss_weights(config, GAE, made, 0.25)
    assert made.columns["loss_weights"].tolist() == [1.0, 0.0, 0.0, 1.0]
    assert made.columns["entropy_weights"].tolist() == [0.5, 0.5, 0.5, 1.0]
    assert made.columns["kl_weights"].tolist() == [0.125, 0.125, 0.125, 0.25]
    assert made.columns["nll_weights"].tolist() == [0.5, 0, 0.5, 0]
