"""Trainers that die within a run: they start again in the same job, and nothing of it is seen in the numbers."""

from __future__ import annotations

import pytest
from dying_ranks import Death, dying, trainers_die
from training_runs import metrics, timeless, train
from whole_run import SMALL, WORLD, small_run, whole_run

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_trainers_that_die_start_again_beside_the_engines(tmp_path_factory: pytest.TempPathFactory) -> None:
    """An actor's rank dies in the first update, with no checkpoint to go back to; the critic in the forward of step 3.
    The engines live through both, and the numbers are those of the undisturbed run.
    """
    calm, deaths = whole_run(tmp_path_factory), [Death("actor", 1, "train_step", 3), Death("critic", 0, "values", 3)]
    run_dir = calm.config.parent / "restarted"
    trainers_die(calm.config, run_dir, WORLD, deaths)
    assert timeless(metrics(run_dir)) == timeless(metrics(calm.run_dir))


@pytest.mark.full
def test_an_engine_that_shares_slots_with_trainers_starts_again_with_them(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """It is killed when it gets the weights for step 2: the numbers are those of roles with slots of their own."""
    calm = small_run(tmp_path_factory)
    run_dir, words = calm.parent / "colocated_engine", ("--train.colocate_all=true", "--ckpt.save_steps=1")
    with dying(run_dir.with_suffix(".deaths"), [Death("rollout", -1, "sync_receive", 3)]):
        code, output = train(calm.parent / "run.toml", run_dir, *SMALL, *words, warm=True)
    assert code == 0, output
    assert "role rollout died: rank 0 of engine 0" in output
    assert "restart 1 of 3 in this job: actor, critic, rollout start again" in output
    assert "step_000001 at step 1/2" in output
    assert timeless(metrics(run_dir)) == timeless(metrics(calm))
