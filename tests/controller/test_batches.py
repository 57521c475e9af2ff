"""How far sampling runs ahead of training, and what stops it. Sampling itself is the test's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from slurm_rlhf.algorithms.policy_distance import ages, staleness
from slurm_rlhf.controller.dispatch import Ahead, Batch
from slurm_rlhf.errors import RoleDied
from slurm_rlhf.records import Trajectory, VersionSpan

pytestmark = pytest.mark.timeout(60)


class Engines:
    """Samples a batch when it is told to, and remembers which were begun."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self._go = threading.Semaphore(0)
        self.error: Exception | None = None

    def __call__(self, step: int) -> Batch:
        self.begun.append(step)
        assert self._go.acquire(timeout=30)
        if self.error:
            raise self.error
        return Batch(step, [], [], {}, 0.0, {"taken": step})

    def finish(self, batches: int = 1) -> None:
        self._go.release(batches)


def until(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("size", [1, 3])
def test_no_batch_is_begun_further_ahead_than_the_bound(size: int) -> None:
    engines = Engines()
    ahead = Ahead(engines, size, last=9)
    engines.finish(9)
    for step in range(1, 10):
        batch = ahead.take(step)
        assert (batch.step, batch.order) == (step, {"taken": step})
        expected = min(step + size, 9)
        until(lambda reached=expected: engines.begun[-1] == reached)  # type: ignore[misc]
        time.sleep(0.02)
        assert engines.begun == list(range(1, expected + 1))


def test_nobody_samples_while_an_evaluation_has_the_engines() -> None:
    engines = Engines()
    ahead = Ahead(engines, 1, last=9)
    engines.finish()
    ahead.take(1)
    until(lambda: engines.begun == [1, 2])
    done = threading.Timer(0.3, engines.finish)
    done.start()
    with ahead.alone():
        assert done.finished.is_set()  # it waited for the batch in flight
        ahead.take(2)
        time.sleep(0.1)
        assert engines.begun == [1, 2]
    until(lambda: engines.begun == [1, 2, 3])
    ahead.close()


def test_what_sampling_raises_comes_out_of_take_and_keeps_nobody_waiting() -> None:
    engines = Engines()
    ahead = Ahead(engines, 1, last=9)
    engines.finish()
    ahead.take(1)
    engines.error = RoleDied("engine 0 is gone")
    engines.finish()
    for _ in range(2):
        with pytest.raises(RoleDied, match="engine 0 is gone"):
            ahead.take(2)
    with ahead.alone():
        pass


def test_after_close_nothing_is_begun() -> None:
    engines = Engines()
    ahead = Ahead(engines, 2, last=9)
    engines.finish()
    ahead.take(1)
    until(lambda: engines.begun == [1, 2])
    ahead.close()
    engines.finish(5)
    time.sleep(0.1)
    assert engines.begun == [1, 2]


def test_staleness_of_a_batch() -> None:
    def sampled(*spans: tuple[int, int, int]) -> Trajectory:
        end = spans[-1][1] if spans else 0
        floats, ids = np.zeros(end, dtype=np.float32), np.zeros(end, dtype=np.int32)
        versions = [VersionSpan(*span) for span in spans]
        return Trajectory(0, 0, ids, ids, floats, np.ones(end, dtype=bool), "stop", "", versions)

    batch = [sampled((0, 2, 3), (2, 3, 4)), sampled((0, 1, 5)), sampled(), sampled((0, 2, 4), (2, 4, 5))]
    age = ages(batch, 5)
    assert age.tolist() == [2, 2, 1, 0, 1, 1, 0, 0]
    mask = np.array([True] * 7 + [False])
    drift = np.array([3, 3, 0, 9, 0, 4, 9, 9], dtype=np.float32)
    assert staleness(batch, age, mask, drift) == {
        "stale_tokens": pytest.approx(5 / 7),
        "staleness_max": 2,
        "mixed_responses": 0.5,
        "stale_logprob_diff": 2,
    }
    assert staleness(batch[1:2], ages(batch[1:2], 5), mask[:1], drift[:1]) == {
        "stale_tokens": 0,
        "staleness_max": 0,
        "mixed_responses": 0,
    }
    assert staleness([], ages([], 5), mask[:0], drift[:0])["stale_tokens"] == 0
