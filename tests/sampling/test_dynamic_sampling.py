"""Groups that dynamic sampling drops, and those that are sampled in their place. Finishing is the test's."""

from __future__ import annotations

import time
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any, cast

import numpy as np
import pytest
from group_engines import BATCH, SAMPLING, Engines, Judge, Streamed, limits, order_of, places, prompt_set
from waiting import until

from slurm_rlhf.config.schema import Config
from slurm_rlhf.data.order import PromptOrder
from slurm_rlhf.errors import FilteredAway, RewardError
from slurm_rlhf.records import Prompt, Trajectory
from slurm_rlhf.rewards.scored import Rewards, joined
from slurm_rlhf.sampling.batches import Batch, EpisodesOver, FilterCounts, GroupState, PromptGroup
from slurm_rlhf.sampling.episodes import Episodes
from slurm_rlhf.sampling.group_stream import GroupStream
from slurm_rlhf.sampling.scheduler import Waves
from slurm_rlhf.wire.calls import GenerateAnswer, GenerateBatch

EVEN = set(range(0, 40, 2))


def test_a_dropped_group_is_replaced_before_the_last_response_is_there() -> None:
    run = Streamed(limits(), judge=Judge(EVEN))
    with run.taking(1) as found:
        until(lambda: run.engines.places() == [0, 1, 2, 3])
        run.engines.finish(1)
        until(lambda: run.engines.places() == [0, 2, 3, 4])
        run.engines.finish(3)
        until(lambda: run.engines.places() == [0, 2, 4, 5])
        run.engines.finish(0, 2, 4, 5)
        until(lambda: run.engines.places() == [6])
        run.engines.finish(6)
    assert places(found[0]) == [0, 2, 4, 6]
    batch = cast(Batch, found[0])
    assert batch.metrics == {"dynamic_filtering/prompts": 7, "dynamic_filtering/pass_rate": pytest.approx(4 / 7)}
    assert batch.judged == 7
    assert batch.rewards.rewards.tolist() == [1, 0] * BATCH
    assert batch.rewards.extra_logs["calls"].tolist() == [1] * 2 * BATCH
    assert (batch.order["place"], batch.order["again"]) == (7, [])


def test_short_responses_are_not_favoured_and_what_is_left_over_comes_first_in_the_next_step() -> None:
    run = Streamed(limits(at_once=8), judge=Judge(set(range(40))))
    with run.taking(1) as found:
        until(lambda: run.engines.places() == list(range(8)))
        run.engines.finish(2, 3, 4, 5, 6)  # a batch and more, but the first two are long
        time.sleep(0.05)
        assert not found
        assert run.order.place == 8  # enough have passed: no other is begun
        run.engines.finish(0, 1)
    assert places(found[0]) == [0, 1, 2, 3]
    assert run.order.state_dict() == order_of(40, BATCH).state_dict() | {"taken": 1}
    assert run.engines.open == []  # the eighth was dropped: no update waits for it
    run.stream.updated(1)
    with run.taking(2) as second:
        until(lambda: run.engines.places() == list(range(4, 12)))
        run.engines.finish(*range(4, 12))
    assert places(second[0]) == [4, 5, 6, 7]


def test_nothing_is_begun_while_the_actor_trains() -> None:
    run = Streamed(limits(), judge=Judge(set(range(40))))
    run.took(1, 4, 0, 1, 2, 3)
    run.stream.updated(1)
    time.sleep(0.03)
    assert run.engines.open == []


def test_with_older_groups_allowed_what_is_left_over_stays() -> None:
    run = Streamed(limits(1, ahead=1.0), judge=Judge(EVEN))
    with run.taking(1) as found:
        run.begun(8)
        run.engines.finish(1, 3, 5)
        run.begun(11)
        run.engines.finish(0, 2, 4, 8)
    assert places(found[0]) == [0, 2, 4, 8]
    batch = cast(Batch, found[0])
    assert (batch.order["place"], batch.order["again"]) == (9, [6, 7])  # 1, 3 and 5 are done with, 9 and 10 come again
    assert batch.metrics["dynamic_filtering/pass_rate"] == pytest.approx(4 / 7)
    run.stream.updated(1)
    with run.taking(2) as second:
        run.begun(15)
        run.engines.finish(*range(6, 15))
        until(lambda: run.engines.places() == [15, 16, 17, 18, 19][: len(run.engines.places())])
        run.flow(second)
    assert places(second[0]) == [6, 10, 12, 14]


@pytest.mark.parametrize("size", [None, 1])
def test_all_groups_filtered_away_end_in_a_clear_stop(size: int | None) -> None:
    run = Streamed(limits(size, tries=3, ahead=1.0), judge=Judge({2}))
    with run.taking(1) as found:
        run.flow(found)
    error = found[0]
    assert isinstance(error, FilteredAway)
    for stated in ("step 1: dynamic sampling kept 1 of 1", "rollout.batch_size = 4", "dynamic_filtering_max_tries = 3"):
        assert stated in str(error)
    assert "widen algo.dynamic_filtering_range" in str(error)
    with run.stream.alone():
        pass


@pytest.mark.parametrize("size", [None, 1])
def test_prompts_that_run_out_end_the_run(size: int | None) -> None:
    run = Streamed(limits(size, ahead=1.0), 8, judge=Judge({0, 2, 3, 5, 6}), last=2)
    for step in (1, 2):
        with run.taking(step) as found:
            run.flow(found, 1)
        run.stream.updated(step)
    assert isinstance(found[0], EpisodesOver)
    stated = str(found[0])
    assert "1 of the groups for step 2 are there, which needs rollout.batch_size = 4, so the run ends after" in stated


def test_what_the_reward_function_raises_comes_out_of_take() -> None:
    judge = Judge(EVEN)
    judge.error = RewardError("reward.py:3: no")
    run = Streamed(limits(), judge=judge)
    assert str(run.took(1, 4, 0)) == "reward.py:3: no"


class Fixed(Engines):
    """One engine that finishes all it is asked for at once, and remembers the rounds."""

    def __init__(self) -> None:
        super().__init__(1)
        self.rounds: list[tuple[list[int], int]] = []

    def call(self, engine: int, method: Any, batch: GenerateBatch | None = None) -> Future[GenerateAnswer]:
        call = super().call(engine, method, batch)
        if asked := [*batch.asked] if batch else []:
            (round,) = {one.round for one in asked}
            self.rounds.append(([one.prompt for one in asked if not one.sample], round))
            self.finish(*self.places())
        return call


class Graded:
    """Stands in for `Scoring`: the mean score of prompt i is (i % 5) / 5, and all rewards are equal."""

    def __call__(self, prompts: list[Prompt], trajectories: list[Trajectory], step: int) -> Rewards:
        scores = [t.prompt % 5 / 5 + 0.1 * (-1) ** t.sample for t in trajectories]
        return Rewards(np.ones(len(scores), dtype=np.float32), np.array(scores, dtype=np.float32))


def rounds(
    order: PromptOrder, good: set[int] | Graded, at_once: int = 0, prompts: int = 40, **algo: object
) -> tuple[GroupStream, Fixed]:
    config, fixed = Config(), Fixed()
    for name, value in algo.items():
        setattr(config.algo, name, value)
    config.rollout.batch_size, config.rollout.n_samples_per_prompt = BATCH, SAMPLING.n
    config.rollout.vllm_generate_batch_size = at_once
    config.algo.dynamic_filtering_enable = config.train.full_determinism = True
    judge = good if isinstance(good, Graded) else Judge(good)
    episodes = Episodes(Waves(cast("Any", fixed), 1, 64))
    rows, scoring = prompt_set(prompts), cast("Any", judge)
    return GroupStream(config, rows, order, 10, episodes, scoring, lambda _: nullcontext()), fixed


def test_rounds_have_sizes_of_what_passed_and_a_resumed_run_has_the_same() -> None:
    order = order_of(40, BATCH)
    batches, fixed = rounds(order, EVEN)
    whole = [batches.take(step) for step in (1, 2, 3)]
    assert [places(batch) for batch in whole] == [[0, 2, 4, 6], [8, 10, 12, 14], [16, 18, 20, 22]]
    # Two of four pass, so the next round has 2 * 5 / 3; the place behind the last that is used comes next.
    assert fixed.rounds[:3] == [([0, 1, 2, 3], 0), ([4, 5, 6, 7], 1), ([7, 8, 9, 10], 1)]
    assert whole[0].metrics == {"dynamic_filtering/prompts": 8, "dynamic_filtering/pass_rate": 0.5}
    again = order_of(40, BATCH)
    again.load_state_dict(whole[0].order)
    resumed, refixed = rounds(again, EVEN)
    assert [places(resumed.take(step)) for step in (2, 3)] == [places(batch) for batch in whole[1:]]
    assert refixed.rounds == fixed.rounds[2:]


def test_a_round_ends_with_its_episode_and_other_seeds_follow() -> None:
    order = order_of(8, BATCH, episodes=2)
    batches, fixed = rounds(order, {1, 6}, prompts=8)
    assert places(batches.take(1)) == [1, 6, 1, 6]
    first, second = ([r for r in fixed.rounds if 1 in r[0]][k] for k in (0, 1))
    assert first[1] != second[1]
    assert all(len(set(asked)) == len(asked) for asked, _ in fixed.rounds)
    with pytest.raises(EpisodesOver):
        batches.take(2)


def test_rounds_have_an_end() -> None:
    batches, fixed = rounds(order_of(40, BATCH, 20), {0}, at_once=6)
    with pytest.raises(FilteredAway, match=r"kept 2 of 60 groups \(3\.3%\)"):
        batches.take(1)
    assert sum(len(asked) for asked, _ in fixed.rounds) == 60  # 10 times 6


def test_groups_are_kept_by_their_mean_score_within_the_range_of_the_configuration() -> None:
    """Two of five groups lie within: all have spread, and their means go from 0 to 0.8."""
    batches, _ = rounds(order_of(40, BATCH), Graded(), dynamic_filtering_range=[0.3, 0.7])
    batch = batches.take(1)
    assert places(batch) == [2, 3, 7, 8]
    passed = sum(i % 5 in (2, 3) for i in range(batch.judged))
    assert batch.metrics["dynamic_filtering/pass_rate"] == passed / batch.judged
    assert places(rounds(order_of(40, BATCH), Graded())[0].take(1)) == [0, 1, 2, 3]
    narrow, _ = rounds(order_of(40, BATCH), Graded(), dynamic_filtering_range=[0.85, 1.0])
    with pytest.raises(FilteredAway, match=r"kept 0 of 40 groups .* strictly between 0\.85 and 1:"):
        narrow.take(1)


@pytest.mark.parametrize(
    ("rewards", "scores", "verdicts"),
    [
        ([0, 1, 1, 1], None, [True, False]),
        ([0, 1, 1, 1], [1, 1, 0, 1], [False, True]),
    ],
)
def test_a_group_is_judged_by_its_scores_and_without_them_by_its_rewards(
    rewards: list[float], scores: list[float] | None, verdicts: list[bool]
) -> None:
    rows = enumerate(prompt_set(2).prompts)
    groups = [PromptGroup(place, prompt, GroupState(0), SAMPLING, 0) for place, prompt in rows]
    counts, found = FilterCounts([]), None if scores is None else np.array(scores, dtype=np.float32)
    counts.judge(groups, Rewards(np.array(rewards, dtype=np.float32), found), 2)
    assert [group.verdict for group in groups] == verdicts
    assert (counts.judged, counts.passed) == (2, 1)


@pytest.mark.parametrize(
    ("engine", "filtered", "mode", "fixed", "expected"),
    [
        ("vllm", False, "drain", False, (True, None, False)),
        ("hf", True, "drain", False, (True, None, True)),  # rounds: the actor has no stream
        ("vllm", False, "inflight", False, (False, 1, False)),
        ("vllm", True, "inflight", False, (False, 1, True)),
        ("vllm", True, "drain", False, (False, None, True)),
        ("vllm", True, "drain", True, (True, None, True)),
    ],
)
def test_streams_and_rounds_are_chosen_by_the_configuration(
    engine: Any, filtered: bool, mode: Any, fixed: bool, expected: tuple[bool, int | None, bool]
) -> None:
    config = Config()
    config.rollout.engine, config.algo.dynamic_filtering_enable = engine, filtered
    config.vllm.sync_mode, config.train.full_determinism = mode, fixed
    made = GroupStream(config, *(None,) * 6)  # type: ignore[arg-type]
    assert (made.rounds, made.size, made.counts is not None) == expected


def test_rewards_of_several_calls_are_joined() -> None:
    f = lambda *values: np.array(values, dtype=np.float32)  # noqa: E731
    first = Rewards(f(1, 2, 3, 4), f(0, 1, 0, 1), {"each": f(5, 6, 7, 8), "all": f(9)}, {"form": f(1, 0, 2, 0)})
    second = Rewards(f(7, 8), f(1, 1), {"all": f(3)}, {"form": f(3, 4)})
    whole = joined([first.select(slice(2, 4)), second])
    assert whole.rewards.tolist() == [3, 4, 7, 8]
    assert whole.scores.tolist() == [0, 1, 1, 1]
    assert {name: values.tolist() for name, values in whole.extra_logs.items()} == {"each": [7, 8], "all": [9, 9, 3, 3]}
    assert whole.components["form"].tolist() == [2, 0, 3, 4]
    with pytest.raises(RewardError, match="no scores, components"):
        joined([first, Rewards(f(1, 2))])
