"""`collect` and `update` of a step, judged by the batches that they send to ranks to train on."""

from __future__ import annotations

import math
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from sampled_responses import response
from steps import make_step

from slurm_rlhf.algorithms.layout import ROWS
from slurm_rlhf.algorithms.losses import KLController
from slurm_rlhf.config.keys import put
from slurm_rlhf.config.schema import Config
from slurm_rlhf.observe.timing import Phases
from slurm_rlhf.records import Experience, Prompt, VersionSpan
from slurm_rlhf.rewards.function import RewardFunction
from slurm_rlhf.rewards.scored import Rewards, Scoring
from slurm_rlhf.rewards.signature import taken
from slurm_rlhf.sampling.batches import Batch
from slurm_rlhf.wire.calls import TrainAnswer, TrainBatch

LENGTHS = [3, 1, 2, 4]
"""Lengths of the responses to two prompts; all tokens of response i are i."""
REWARDS = [1.0, 1.0, 2.0, 3.0]


class Rank:
    """A role of one rank, which answers the same number for every token and keeps what it is to train on."""

    world = 1
    layout = ROWS

    def __init__(self, answer: float) -> None:
        self.answer = answer
        self.trained: list[TrainBatch] = []

    def start_each(self, method: Any, batches: list[Any], /) -> list[Future[Any]]:
        (batch,), future = batches, Future[Any]()
        if isinstance(batch, TrainBatch):
            self.trained.append(batch)
            future.set_result(TrainAnswer({"lr": 0.0, "grad_norm": 0.0}))
        else:
            future.set_result(np.full(len(batch.experience.action_mask), self.answer, dtype=np.float32))
        return [future]


class Run:
    """One step whose responses ended for `reasons`, and whose engine gave a token of the last one `logprob`."""

    VERSION = 0  # the actor's; all responses have version 0

    def __init__(self, roles: list[str], reasons: str = "stop stop stop stop", logprob: float = -1.0, **keys: object):
        config = Config()
        config.rollout.batch_size, config.rollout.n_samples_per_prompt, config.train.batch_size = 2, 2, 4
        for name, value in keys.items():
            put(config, name.replace("__", "."), value)
        answers = (("actor", -1.0), ("reference", -2.0), ("critic", 0.5), ("reward", 0.0))
        self.roles = {name: Rank(answer) for name, answer in answers}
        self.roles = {name: self.roles[name] for name in roles}
        prompts = [Prompt(i, "", np.array([9], dtype=np.int32)) for i in range(2)]
        found = []
        for row, (length, reason) in enumerate(zip(LENGTHS, reasons.split(), strict=True)):
            ids, spans = prompts[row // 2].token_ids, [VersionSpan(0, length, 0)]
            found.append(response(row // 2, "", row % 2, length, ids, reason, spans))
            found[-1].response_ids[:], found[-1].rollout_logprobs[:] = row, -1.0
        found[3].rollout_logprobs[1] = logprob
        reward = Scoring(RewardFunction(reward_func, "", taken(reward_func, "reward_func")), 10.0)
        self.phases: list[str] = []  # as they begin, each again after one inside it
        kl, phases = KLController(config.algo.kl.init_coef, 0.0, 1), Phases(self.phases.append)
        self.step = make_step(config, self.roles, reward=reward, kl=kl, phases=phases)
        config.vllm.sync_mode = "inflight" if self.VERSION else "drain"  # no engines are asked
        self.batch = Batch(3, prompts, found, {}, 1.0, {})
        self.experience, self.metrics = self.step.collect(self.batch, self.VERSION)
        self.metrics = self.step.update(3, found, self.experience, self.metrics, self.VERSION)

    def trained(self, role: str) -> tuple[float, Experience]:
        """(denominator, batch) of the only optimizer step, its responses in their order."""
        (sent,) = self.roles[role].trained
        first = sent.experience.token_ids[sent.experience.token_offsets[:-1] + 1]
        return sent.denominator, sent.experience.select(np.argsort(first).tolist())


def reward_func(response_ids: list[list[int]], **_: object) -> list[float]:
    return [REWARDS[ids[0]] for ids in response_ids]


@pytest.mark.parametrize("logprob", [math.nan, -math.inf])
def test_a_token_without_a_log_prob_of_the_engine_is_not_trained_on(logprob: float) -> None:
    run = Run(["actor"], logprob=logprob, algo__advantage__estimator="rloo", algo__correction__preset="tis")
    denominator, sent = run.trained("actor")
    assert run.metrics["correction/not_finite"] == 1
    assert denominator == sum(LENGTHS) - 1
    assert np.flatnonzero(~sent.action_mask).tolist() == [7]
    assert_array_equal(sent.columns["loss_weights"], [*[1] * 7, 0, 1, 1])
    assert_array_equal(sent.columns["advantages"], [0, 0, 0, 0, -1, -1, 1, 0, 1, 1])
    assert all(math.isfinite(value) for value in run.metrics.values())


@pytest.mark.parametrize("masked", [True, False])
def test_a_truncated_response_is_in_no_term_of_the_loss(masked: bool) -> None:
    """rollout.mask_truncated does it; without it all responses count. Every term has the mask, or weights, or both."""
    keys = {"policy_loss_type": "gspo", "entropy_coef": 0.1, "nll_coef": 0.1}
    kl: dict[str, object] = {"algo__kl__use_loss": True, "algo__kl__estimator": "k2", "algo__kl__init_coef": 0.5}
    run = Run(
        ["actor", "reference", "critic"],
        "stop stop stop length",
        rollout__mask_truncated=masked,
        **kl,
        **{f"actor__{name}": value for name, value in keys.items()},
    )
    left, kept = [*[True] * 6, *[not masked] * 4], 6 if masked else 10
    (responses, actor), (tokens, critic) = run.trained("actor"), run.trained("critic")
    assert (responses, tokens) == (3 if masked else 4, kept)
    assert actor.action_mask.tolist() == critic.action_mask.tolist() == left
    means = np.repeat([1 / length for length in LENGTHS], LENGTHS)
    for name, factor in (("loss", 1.0), ("entropy", 1.0), ("kl", 0.5)):
        assert_allclose(actor.columns[f"{name}_weights"][left], factor * means[left], rtol=1e-6)
    assert_allclose(actor.columns["nll_weights"], np.where(left, 1 / kept, 0), rtol=1e-6)
    assert run.experience.action_mask.all()  # log-probs are compared on all of them
    assert run.metrics["kl"] == pytest.approx(sum(LENGTHS) / 4 / 2)


def test_the_turn_of_a_reward_model_counts_for_rewards() -> None:
    """Other roles' passes do not count there; without a reward model nothing is waited for before them."""
    for roles, begin in ((["actor", "reward"], ["forward", "reward", "forward", ""]), (["actor"], ["forward", ""])):
        run = Run(roles, train__colocate_all=True, algo__advantage__estimator="rloo")
        assert run.phases[: len(begin) + 1] == [*begin, "reward"]


def test_rewards_that_are_there_or_were_asked_for_are_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(["actor"], algo__advantage__estimator="rloo")
    there, asked = Rewards(np.array(REWARDS, dtype=np.float32)), Future[Rewards]()
    asked.set_result(there)
    monkeypatch.setattr(Scoring, "begin", None)
    for batch in (replace(run.batch, rewards=there), replace(run.batch, asked=[asked])):
        assert run.step.collect(batch, 0)[0].rewards.tolist() == REWARDS


class LaterRun(Run):
    """The same where the actor is two updates ahead of the responses."""

    VERSION = 2


def test_with_bypass_the_age_of_the_whole_batch_is_reported_whatever_the_ranks_pass() -> None:
    run = LaterRun(["actor"], algo__correction__bypass=True, train__batch_size=2, algo__advantage__estimator="rloo")
    assert (run.metrics["staleness_max"], run.metrics["stale_tokens"], run.metrics["mixed_responses"]) == (2, 1, 0)
