"""Micro-batches of passes without gradients have a token budget of their own, larger than that of training."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, cast

import numpy as np
import pytest
from sampled_responses import response
from steps import make_step

from slurm_rlhf.algorithms.layout import ROWS
from slurm_rlhf.algorithms.losses import KLController
from slurm_rlhf.config.schema import Config
from slurm_rlhf.records import Experience, Prompt
from slurm_rlhf.rewards.scored import ModelRewards, Scoring
from slurm_rlhf.sampling.batches import Batch
from slurm_rlhf.wire.calls import ForwardBatch, TrainAnswer
from slurm_rlhf.wire.handles import RoleHandle

TRAINED = 40


class Ranks:
    """A role of two ranks that answers at once and remembers the largest padded micro-batch of each method."""

    world = 2
    layout = ROWS

    def __init__(self) -> None:
        self.largest: dict[str, int] = {}
        self.count: dict[str, int] = {}

    def start_each(self, method: Any, batches: list[Any], /) -> list[Future[Any]]:
        return [self._answer(method.__name__, batch.experience, batch.micro) for batch in batches]

    def _answer(self, method: str, exp: Experience, micro: list[list[int]]) -> Future[Any]:
        assert sorted(row for rows in micro for row in rows) == list(range(len(exp)))
        sizes = [int(exp.lengths[rows].max()) * len(rows) for rows in micro]
        self.largest[method] = max(self.largest.get(method, 0), *sizes)
        self.count[method] = self.count.get(method, 0) + len(micro)
        future: Future[Any] = Future()
        column = np.zeros(len(exp.action_mask), dtype=np.float32)
        future.set_result(
            column
            if method in ("logprobs", "values")
            else np.zeros(len(exp), dtype=np.float32)
            if method == "score"
            else TrainAnswer({"lr": 0.0, "grad_norm": 0.0, "ratio": 1.0, "approx_kl": 0.0})
        )
        return future


def run(forward: int) -> dict[str, Ranks]:
    """One step over 32 responses of 9 tokens."""
    config = Config()
    config.rollout.batch_size, config.train.batch_size = 32, 32
    config.train.max_tokens_per_gpu, config.train.forward_max_tokens_per_gpu = TRAINED, forward
    roles = {name: Ranks() for name in ("actor", "critic", "reference", "reward")}
    handles = cast("dict[str, RoleHandle[Any]]", roles)
    prompts = [Prompt(i, "", np.arange(4, dtype=np.int32)) for i in range(32)]
    responses = [response(i, tokens=5, prompt_ids=prompts[i].token_ids) for i in range(32)]
    reward = Scoring(ModelRewards(handles["reward"], config.train.forward_tokens), config.timeout.reward)
    step = make_step(config, handles, reward=reward, kl=KLController(0.01, 0.0, 1))
    experience, metrics = step.collect(Batch(1, prompts, responses, {}, 1.0, {}), 0)
    step.update(1, responses, experience, metrics, 0)
    return roles


@pytest.mark.parametrize(("forward", "budget"), [(0, 4 * TRAINED), (90, 90), (20, 20)])
def test_passes_without_gradients_have_their_own_budget(forward: int, budget: int) -> None:
    roles = run(forward)
    fits = budget // 9
    for role, method in (
        ("actor", "logprobs"),
        ("reference", "logprobs"),
        ("critic", "values"),
        ("reward", "score"),
    ):
        assert roles[role].largest[method] == min(fits, 16) * 9, role
        assert roles[role].count[method] == 2 * -(-16 // fits), role
    for role in ("actor", "critic"):
        assert roles[role].largest["train_step"] == TRAINED // 9 * 9
        assert roles[role].count["train_step"] == 2 * 4


def test_responses_are_spread_over_three_ranks_of_a_reward_model() -> None:
    """Five of them: the last rank gets one again, so that all have equally many."""

    class Role:
        world = 3
        layout = ROWS

        def start_each(self, method: object, requests: list[ForwardBatch]) -> list[Future[Any]]:
            answers: list[Future[Any]] = [Future() for _ in requests]
            assert {len(request.experience) for request in requests} == {2}
            for answer, request in zip(answers, requests, strict=True):
                answer.set_result(request.experience.prompt_lens.astype(np.float32))
            return answers

    given = [response(size, tokens=2, prompt_ids=np.zeros(size, np.int32)) for size in (3, 1, 5, 2, 4)]
    found = ModelRewards(Role(), 1000)([], given)  # type: ignore[arg-type]
    assert found.rewards.tolist() == [3, 1, 5, 2, 4]
