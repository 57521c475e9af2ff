"""Trainers that die within a run: they start again in the same job, and nothing of it is seen in the numbers."""

from __future__ import annotations

import pytest
from dying_ranks import Death, trainers_die
from training_runs import metrics, timeless
from whole_run import WORLD, whole_run

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(400)]


def test_trainers_that_die_start_again_beside_the_engines(tmp_path_factory: pytest.TempPathFactory) -> None:
    """An actor's rank dies in the first update, with no checkpoint to go back to; the critic in the forward of step 3.
    The engines live through both, and the numbers are those of the undisturbed run.
    """
    calm, deaths = whole_run(tmp_path_factory), [Death("actor", 1, "train_step", 3), Death("critic", 0, "values", 3)]
    run_dir = calm.config.parent / "restarted"
    trainers_die(calm.config, run_dir, WORLD, deaths)
    assert timeless(metrics(run_dir)) == timeless(metrics(calm.run_dir))
