"""`sbatch sbatch/quickstart.sh` as a newcomer types it, on a node that has no way out of the cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkout import MADE_HERE
from slurm_cluster import CHECKOUT, Cluster
from training_runs import metrics

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.mark.skipif(not MADE_HERE, reason="this environment was not made by sbatch/environment.sh")
def test_the_quickstart_is_a_batch_script(slurm: Cluster) -> None:
    """Shortened by overrides alone. The data and the model are those of the last quickstart here, if there was one."""
    run_dir = slurm.shared / "quickstart"
    job = slurm.sbatch(
        *(f"--output={run_dir}.log", "sbatch/quickstart.sh", f"--run_dir={run_dir}", "--train.max_steps=2"),
        *("--recipe=grpo", "--eval.max_samples=64"),
        cwd=CHECKOUT,
    )
    ended = slurm.wait_over(job)
    said = Path(f"{run_dir}.log").read_text()
    assert ended == ("COMPLETED", 0), said
    assert f"{CHECKOUT}/.venv is current" in said
    assert "4/4 grpo" in said
    assert f"job {job} on gpu001, run directory {run_dir}" in said
    assert f"to look inside: srun --jobid={job} " in said
    assert len(metrics(run_dir)) == 2
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["world"] == {"actor": 1, "rollout": 1}
    logs = {path.name for path in (run_dir / "logs").iterdir()}
    assert logs >= {"actor.gpu001.0.log", "rollout.gpu001.0.log", "actor.srun.log"}  # steps of the job, not children
    assert not slurm.processes("gpu001")
