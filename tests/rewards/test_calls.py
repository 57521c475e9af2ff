"""One call for several groups of responses: what failed is asked again at once, and each group gets its own rewards."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest
from sampled_responses import sampled
from waiting import HANG_S, until

from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import RewardError, WorkerError
from slurm_rlhf.polling import in_thread
from slurm_rlhf.rewards.items import Item
from slurm_rlhf.rewards.pooled import CalledRewards
from slurm_rlhf.rewards.scored import Rewards, Scoring, parse_answer
from slurm_rlhf.workers.pool import LATE


class Held(CalledRewards):
    """Keeps calls open until the test answers them."""

    def __init__(self) -> None:
        config = Config()
        config.reward.on_error = -1.0
        super().__init__(config, None, HANG_S)
        self.begun: list[tuple[list[str], Future[Any]]] = []

    def _begin(self, items: Sequence[Item], step: int, timeout_s: float) -> Future[Any]:
        self.begun.append(([item["response"] for item in items], Future()))
        return self.begun[-1][1]

    def _parsed(self, answer: Any, count: int) -> Rewards:
        return parse_answer(answer, count, "the function")


def test_responses_of_all_groups_that_are_late_are_asked_again_before_one_is_answered() -> None:
    source = Held()
    found = in_thread(lambda: source(*sampled("abcd", 2)), "reward")
    until(lambda: len(source.begun) == 2)
    for number in (1, 0):  # the second one first: the first one holds nobody up
        source.begun[number][1].set_exception(WorkerError(LATE, "it is late"))
        until(lambda: len(source.begun) == 6 - 2 * number, "a call for each response alone")  # noqa: B023 called at once
    for number, (_, call) in enumerate(source.begun[2:]):
        call.set_result([number])
    assert [texts for texts, _ in source.begun] == [["a", "b"], ["c", "d"], ["c"], ["d"], ["a"], ["b"]]
    assert found.result(HANG_S).rewards.tolist() == [2, 3, 0, 1]


def test_each_group_of_a_call_gets_its_own_rewards_or_its_error() -> None:
    source = Held()
    scoring = Scoring(source, HANG_S)
    parts = scoring.begin_each(*sampled("abcd", 2), 1, 2)
    until(lambda: len(source.begun) == 2)
    for number, (_, call) in enumerate(source.begun):
        call.set_result([number, number + 10])
    assert [part.result(HANG_S).rewards.tolist() for part in parts] == [[0, 10], [1, 11]]
    assert scoring.wait(parts[::-1], count=4, step=1).rewards.tolist() == [1, 11, 0, 10]
    source.begun.clear()
    again = scoring.begin_each(*sampled("abcd", 2), 2, 2)
    until(lambda: len(source.begun) == 2)
    source.begun[0][1].set_exception(RewardError("no worker is left"))
    with pytest.raises(RewardError, match="no worker is left"):
        scoring.wait(again[1:], count=2, step=2)
