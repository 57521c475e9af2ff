"""A job that is requeued, twice, writes the numbers of one that was left alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from slurm_nodes import SlurmNodes, slurm
from test_slurm_run import config, left, steps, submit
from training_runs import metrics, timeless

__all__ = ["config", "slurm"]
pytestmark = pytest.mark.timeout(420)

STEPS = 30
LENGTH = (f"--train.max_steps={STEPS}", "--train.num_episodes=10", "--ckpt.save_steps=0")
NODES = ["--nodes=3", "--gres=gpu:8", "--cpus-per-task=4", "--mem=8000", "--requeue"]


def test_requeued_twice_it_writes_the_same_metrics(slurm: SlurmNodes, config: Path) -> None:
    calm, requeued = slurm.shared / "calm", slurm.shared / "requeued"
    job = submit(slurm, config, requeued, NODES, *LENGTH)
    for restart in (1, 2):
        done = steps(requeued)
        slurm.wait_until(lambda done=done: steps(requeued) > done, f"step {done + 1}", 150)
        slurm.run("scancel", "--batch", "--signal=USR1", str(job))
        slurm.wait_until(lambda restart=restart: int(slurm.job(job)["Restarts"]) == restart, f"restart {restart}", 60)
        summary = json.loads((requeued / "summary.json").read_text())
        assert summary["status"] == "stopped"
        assert (requeued / "checkpoints" / f"step_{summary['steps']:06d}").is_dir()
        slurm.wait_until(
            lambda: not any(left(slurm, requeued, node) for node in slurm.names), "end of its processes", 20
        )
    assert slurm.wait_over(job, 200) == ("COMPLETED", 0), Path(f"{requeued}.log").read_text()
    assert slurm.wait_over(submit(slurm, config, calm, NODES, *LENGTH), 150) == ("COMPLETED", 0)
    assert len(metrics(calm)) == STEPS
    assert timeless(metrics(requeued)) == timeless(metrics(calm))
    assert Path(f"{requeued}.log").read_text().count("resuming from") == 2
