"""A stream of groups: what is begun, what a batch waits for, what a checkpoint says. Finishing is the test's."""

from __future__ import annotations

import random
import threading
import time
from typing import cast

import pytest
from group_engines import BATCH, Streamed, limits, order_of, places
from waiting import until

from slurm_rlhf.config.load import load_config
from slurm_rlhf.data.order import PromptOrder
from slurm_rlhf.errors import RoleDied
from slurm_rlhf.sampling import episodes
from slurm_rlhf.sampling.batches import Batch
from slurm_rlhf.sampling.group_stream import GroupStream


@pytest.mark.parametrize("size", [1, 3])
def test_no_group_is_begun_further_ahead_than_the_bound(size: int) -> None:
    run = Streamed(limits(size))
    for step in range(1, 11):
        with run.taking(step) as found:
            begun = min((step + size) * BATCH, 40)
            run.begun(begun)
            run.engines.finish(*run.engines.places()[:BATCH])
        assert places(found[0]) == list(range((step - 1) * BATCH, step * BATCH))
        # While it is trained on, the engines have the policy from before: no more than that.
        time.sleep(0.01)
        assert run.order.place == begun
        run.engines.version = step
        run.stream.updated(step)
    assert run.engines.seeds == {place: place // BATCH for place in range(40)}  # as where batches are sampled whole


def test_a_share_of_a_batch_is_begun_while_the_actor_trains_and_the_rest_by_its_new_policy() -> None:
    run = Streamed(limits(3, ahead=0.25))
    run.took(1, BATCH + 1, *range(BATCH))
    run.engines.finish(BATCH)
    time.sleep(0.03)
    assert run.order.place == BATCH + 1  # the engines are idle, and one group is there for the next step
    run.engines.version = 1
    run.stream.updated(1)
    run.begun(2 * BATCH + 1)  # before the step asks
    with run.taking(2) as found:
        run.engines.finish(*run.engines.places()[: BATCH - 1])
    assert places(found[0]) == list(range(BATCH, 2 * BATCH))


@pytest.mark.parametrize(
    ("words", "size", "stale"),
    [
        (["--vllm.sync_mode=inflight"], 1, 2),  # a quarter of a batch of 9, and not more
        (["--vllm.sync_mode=inflight", "--train.staleness_threshold=2", "--train.async_queue_size=4"], 4, 18),
        (["--vllm.sync_mode=inflight", "--train.staleness_threshold=0"], 1, 0),
        ([], None, 2),
    ],
)
def test_the_keys_that_the_rule_is_of(words: list[str], size: int | None, stale: int) -> None:
    config, parts = load_config(None, [*words, "--rollout.batch_size=9"]), (None,) * 6
    made = GroupStream(config, *parts)  # type: ignore[arg-type]
    assert (made._batch, made.size, made._ahead) == (9, size, stale)


def test_a_batch_is_made_of_what_is_finished_and_a_straggler_comes_later() -> None:
    run = Streamed(limits(1))
    with run.taking(1) as found:
        until(lambda: run.engines.places() == list(range(8)))
        run.engines.finish(1, 2, 4, 7)
    assert places(found[0]) == [1, 2, 4, 7]
    assert found[0].order["again"] == [0, 3, 5, 6]  # begun, and not trained on
    assert (found[0].order["place"], found[0].order["taken"]) == (8, 1)
    run.stream.updated(1)
    with run.taking(2) as second:
        until(lambda: run.engines.places() == [0, 3, 5, 6, 8, 9, 10, 11])
        run.engines.finish(8, 9, 10, 11)  # as many as a batch, and the four of before must not become older
        time.sleep(0.05)
        assert not second
        run.engines.finish(6, 5, 3, 0)
    assert places(second[0]) == [0, 3, 5, 6]
    assert cast(Batch, second[0]).order == order_of(40, BATCH).state_dict() | {"taken": 2}  # 8 to 11 come again


def test_nothing_is_begun_while_the_next_batch_is_ready() -> None:
    """The trainer is the slower side then: what was begun would only be older when its turn comes."""
    run = Streamed(limits(3))
    run.took(1, 16, *range(4))
    run.engines.finish(*range(4, 9))  # another batch, and one more
    until(lambda: sum(group.state.finished for group in run.stream._groups) == 5)
    run.stream.updated(1)
    time.sleep(0.03)
    assert run.order.place == 16
    assert places(run.stream.take(2)) == [4, 5, 6, 7]
    run.begun(20)  # three batches behind the one in training


def test_a_resumed_run_begins_with_the_groups_that_were_in_flight() -> None:
    order = order_of(40, BATCH)
    order.load_state_dict({**order.state_dict(), "taken": 1, "place": 8, "again": [0, 3, 5, 6]})
    run = Streamed(limits(1), order=order)
    with run.taking(2) as found:
        until(lambda: run.engines.places() == [0, 3, 5, 6, 8, 9, 10, 11])
        run.engines.finish(0, 3, 5, 6)
    assert places(found[0]) == [0, 3, 5, 6]
    assert {run.engines.seeds[place] for place in (0, 3)} == {0}  # as the first time


def test_the_engines_are_free_for_an_evaluation() -> None:
    run = Streamed(limits(1))
    with run.stream.alone():  # before the first batch
        pass
    run.took(1, 8, 0, 1, 2, 3)
    run.stream.updated(1)
    run.begun(12)
    done = threading.Timer(0.1, lambda: run.engines.finish(*range(4, 12)))
    done.start()
    with run.stream.alone():
        assert run.engines.open == []  # it waited for the groups in flight
        run.stream.updated(1)
        time.sleep(0.02)
        assert run.engines.open == []
    assert places(run.stream.take(2)) == [4, 5, 6, 7]


def test_what_an_engine_raises_comes_out_of_take_and_keeps_nobody_waiting() -> None:
    run = Streamed(limits(1))
    with run.taking(1) as found:
        run.begun(8)
        run.engines.fail(RoleDied("engine 0 is gone"))
    assert isinstance(found[0], RoleDied)
    with run.stream.alone():
        pass
    with pytest.raises(RoleDied, match="engine 0 is gone"):
        run.stream.take(1)


def test_after_close_nothing_is_begun() -> None:
    run = Streamed(limits(2))
    run.took(1, 12, 0, 1, 2, 3)
    run.stream.close()
    run.stream.updated(1)
    run.engines.finish(*range(4, 12))
    until(lambda: not run.episodes._thread.is_alive())
    assert run.order.place == 12


def test_an_engine_that_starts_late_gets_groups() -> None:
    run = Streamed(limits(1))
    run.engines.ready = [0]
    run.took(1, 8, 0, 1, 2, 3)
    run.engines.ready = [0, 1]
    run.stream.updated(1)
    run.begun(12)
    assert {row[0] for row in run.engines.rows() if row[1] >= 8} == {1}  # it has the least in hand


def test_rows_of_a_small_data_set_may_be_in_flight_twice() -> None:
    """Engines know a request by its number: five rows, four of them a batch, and four episodes."""
    order = PromptOrder(5, BATCH, 4, 3)
    run = Streamed(limits(1), prompts=5, order=order, last=4)
    seen: list[int] = []
    for step in range(1, 5):
        with run.taking(step) as found:
            run.flow(found)
        seen += places(found[0])
        run.stream.updated(step)
    assert sorted(seen) == sorted(order.position(place) for place in range(16))


def test_a_run_with_random_lengths_keeps_the_bound() -> None:
    run, dice = Streamed(limits(2)), random.Random(0)
    trained: list[int] = []
    for step in range(1, 11):
        with run.taking(step) as found:
            while not found:
                if left := run.engines.places():
                    run.engines.finish(dice.choice(left[1:] or left))  # the first of them is long
        trained += places(found[0])
        batch = cast(Batch, found[0])
        assert max(step - 1 - span.version for t in batch.trajectories for span in t.versions) <= 2
        run.engines.version = step
        run.stream.updated(step)
    assert sorted(trained) == list(range(40))


def test_a_stream_without_news_looks_for_late_engines_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episodes, "LATE_S", 0.01)
    run, looks = Streamed(limits(1)), []
    run.episodes._admit = looks.append
    with run.taking(1) as found:
        until(lambda: len(looks) > 3, "looks for engines")
        run.engines.finish(*run.engines.places()[:BATCH])
    assert places(found[0]) == list(range(BATCH))
