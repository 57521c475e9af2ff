"""Rewards brought to a common scale, and how many a clip changes."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest

from slurm_rlhf.algorithms.reward_shaping import MUCH, FixedScale, RunningScale, clip_warning, clipped_share, normalized


def test_running_statistics_are_those_of_all_rewards_together() -> None:
    rng = np.random.default_rng(0)
    batches = [rng.normal(loc, 3.0, size).astype(np.float32) for loc, size in ((1000, 1), (1000, 7), (1010, 64))]
    scale = RunningScale()
    for number, batch in enumerate(batches, start=1):
        scale = scale.with_batch(batch)
        seen = np.concatenate(batches[:number]).astype(np.float64)
        assert scale.count == len(seen)
        assert scale.mean == pytest.approx(seen.mean(), rel=1e-12)
        assert scale.std == pytest.approx(max(seen.std(), 1e-4), rel=1e-9)
    expected = (batches[-1] - seen.mean()) / seen.std()
    np.testing.assert_allclose(normalized(batches[-1], scale), expected, rtol=1e-6, atol=1e-6)


def test_a_checkpoint_of_it_goes_on_bit_for_bit() -> None:
    rng = np.random.default_rng(1)
    scale = RunningScale().with_batch(rng.normal(size=33)).with_batch(rng.normal(size=5))
    again = RunningScale(**json.loads(json.dumps(asdict(scale))))
    later = rng.normal(size=20)
    assert again == scale
    assert normalized(later, again.with_batch(later)).tobytes() == normalized(later, scale.with_batch(later)).tobytes()


def test_a_batch_may_be_looked_at_and_dropped() -> None:
    scale = RunningScale().with_batch([1.0, 2.0])
    scale.with_batch([100.0])
    assert scale == RunningScale(2, 1.5, 0.5)


def test_equal_rewards_become_zero_and_an_empty_batch_changes_nothing() -> None:
    scale = RunningScale().with_batch(np.full(4, 0.1, dtype=np.float32))
    assert normalized(np.full(4, 0.1, dtype=np.float32), scale).tolist() == [0.0] * 4
    assert scale.with_batch([]) == scale
    assert normalized([], RunningScale()).tolist() == []


def test_a_models_own_statistics_stay() -> None:
    assert normalized([2.0, 6.0], FixedScale(2.0, 4.0).with_batch([50.0])).tolist() == [0.0, 1.0]


def test_the_share_of_what_a_clip_changes() -> None:
    assert clipped_share(np.random.default_rng(2).normal(25, 3, 400), [-10, 10]) == 1.0
    assert clipped_share([-10, 10, 10.1, -11, 0], [-10, 10]) == pytest.approx(0.4)
    assert clipped_share([], [-10, 10]) == 0.0


def test_it_is_reported_above_five_percent_and_again_when_it_grows() -> None:
    stated, said = 0.0, []
    for share in (0.0, MUCH, 0.06, 0.06, 0.051, 0.31, 0.3, 1.0):
        if warning := clip_warning(share, stated, [-10.0, 10.0]):
            stated = share
            said.append(warning.split(" of the rewards")[0])
    assert said == ["warning: 6%", "warning: 31%", "warning: 100%"]
    assert "reward.clip_range = [-10, 10]" in clip_warning(1.0, 0.0, [-10.0, 10.0])
