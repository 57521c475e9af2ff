"""The metrics of a batch that several policies have sampled."""

from __future__ import annotations

import numpy as np
import pytest

from slurm_rlhf.algorithms.policy_distance import ages, staleness
from slurm_rlhf.records import Trajectory, VersionSpan


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
