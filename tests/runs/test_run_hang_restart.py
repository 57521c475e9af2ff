"""A trainer that hangs within a run: the trainers start again in the same job, and nothing of it is in the numbers."""

from __future__ import annotations

import re

import pytest
from dying_ranks import Death, dying
from training_runs import metrics, started, timeless
from waiting import scaled
from whole_run import WORLD, whole_run

from slurm_rlhf.observe.run_log import read_events

# Behind -m full for its time: two whole runs.
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.full]

HANG = ("--train.on_hang=restart", f"--timeout.hang={scaled(3)}", f"--timeout.hang_grace={scaled(2)}")


def test_a_collective_entered_by_all_but_one_is_restarted_in_place(tmp_path_factory: pytest.TempPathFactory) -> None:
    """An actor's rank takes its eleventh call of train_step, in step 3, and stays away from the collective."""
    calm, deaths = whole_run(tmp_path_factory), [Death("actor", 1, "train_step", 11, hangs=True)]
    run_dir = calm.config.parent / "hung"
    with dying(run_dir.with_suffix(".deaths"), deaths), started(calm.config, run_dir, *WORLD, *HANG, warm=True) as run:
        run.wait_for_step(2)
        engines, actors = sorted(run.workers("rollout")), sorted(run.workers("actor"))
        run.wait_for_file("hang-3/report.txt")
        run.wait_for_step(3)
        assert sorted(run.workers("rollout")) == engines
        assert not set(run.workers("actor")) & set(actors)
        code, output = run.wait()
        run.assert_gone()
    assert code == 0, output
    report = (run_dir / "hang-3" / "report.txt").read_text()
    assert re.search(r"behind is actor rank 1 on \S+ \(pid \d+, in train_step for \d+ s\)", report)
    assert "actor rank 0 waits in " in report
    assert "the run ends and starts again (train.on_hang = restart)" in output
    assert "restart 1 of 3 in this job: actor, critic, reference start again; the engines go on" in output
    assert "step_000002 at step 2/4" in output
    kinds = [event.event for event in read_events(run_dir / "events.jsonl")]
    assert [kind for kind in kinds if kind not in ("warning", "checkpoint")] == ["start", "hang", "restart", "finish"]
    assert timeless(metrics(run_dir)) == timeless(metrics(calm.run_dir))
