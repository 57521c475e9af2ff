"""Measurements of a run on CPUs before its first step."""

from __future__ import annotations

import pytest

from slurm_rlhf.config.schema import Config
from slurm_rlhf.run.prediction import Prediction


def test_a_weight_update_takes_what_others_took_before_the_first_step() -> None:
    found, seconds = Prediction(Config()), [3.0, 1.0, 2.0]
    found.measure_sync(dict)  # all engines were lost
    assert found.sync_s is None
    found.measure_sync(lambda: {"time/sync_transfer": seconds.pop()})
    assert found.sync_s == 2.0
    found.measure_sync(lambda: pytest.fail("the trainers have only been started again"))
