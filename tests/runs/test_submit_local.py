"""submitit's executor of this machine: what a job of a run gives back, and what one that fails says."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest
from holds import Holds
from sums_task import PACE
from training_runs import Run

from slurm_rlhf.config.load import load_config
from slurm_rlhf.nodes.submitit_job import SIGNAL, submit

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.usefixtures("own_environment")]

STEPS = 16
SMALL = (
    *("--algo.advantage.estimator=group_norm", "--algo.kl.init_coef=0", "--eval.dataset="),
    *("--slurm.time=30", "--slurm.signal_lead_s=60"),
)
"""An actor rank and an engine."""


def submitted(config: Path, run_dir: Path, *overrides: str) -> tuple[Any, Run]:
    """The job, and the run in it as the other tests see one."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    job = submit(load_config(config, [f"--run_dir={run_dir}", *SMALL, *overrides]), local=True)
    run = Run.__new__(Run)
    run.run_dir, run.process = run_dir, job._process
    return job, run


def task(job: Any) -> int:
    """Process id of the process that submitit's controller started."""
    children = psutil.Process(job._process.pid).children()
    return next(child.pid for child in children if "submitit.core._submit" in child.cmdline())


def test_preempted_it_goes_on_and_its_result_is_the_summary(config: Path) -> None:
    run_dir, holds = config.parent / "local", Holds(config)
    holds.hold(PACE, "0.5")  # its steps are not over before the signal
    job, run = submitted(config, run_dir, f"--train.max_steps={STEPS}", "--train.num_episodes=4")
    try:
        run.wait_for_step(1)
        # submitit's controller sends this signal at the end of the time.
        os.kill(task(job), SIGNAL)
        holds.let_go(PACE)
        result = job.result()
    finally:
        run.end()
    assert result["status"] == "finished"
    assert result["steps"] == STEPS
    assert result == json.loads((run_dir / "summary.json").read_text())
    said = job.stdout()
    assert "Requeued job" in said
    assert "resuming from" in said
    assert said.count(f"{STEPS}/{STEPS}") == 1
