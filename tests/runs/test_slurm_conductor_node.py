"""The node of the batch script crashes, and with it the conductor: nobody is left who could end or move anything."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from slurm_cluster import CHECKOUT, COMMAND, Cluster, said
from slurm_undisturbed import STEPS, calm_run
from training_runs import metrics, steps, summary, timeless

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(900)]

NODES = ["--nodes=3", "--gres=gpu:8", "--cpus-per-task=4", "--mem=8000"]
FIRST, OTHERS = "gpu001", ("gpu002", "gpu003")
SILENCE_S = 12.0
WORDS = (
    *("--ckpt.save_steps=2", f"--train.max_steps={STEPS}", "--train.num_episodes=10"),
    *(f"--timeout.heartbeat={SILENCE_S:g}", "--timeout.heartbeat_interval=0.5"),
)
NOTICED_S = 20
"""In place of SlurmdTimeout's 300 s."""


@pytest.mark.parametrize("how", ["--requeue", "--no-requeue", "--no-kill"])
def test_the_ranks_leave_by_themselves_and_the_run_goes_on_from_its_checkpoint(slurm: Cluster, how: str) -> None:
    """With `--requeue` Slurm starts the job again without that node, else the same command, or `scontrol requeue`.

    The metrics are those of the calm run, bit for bit; `status` says what happened before and after Slurm knows it.
    """
    calm, run_dir = calm_run(slurm), slurm.shared / f"headless{how}"
    config = CHECKOUT / "sbatch" / "ppo_32b.toml"
    job = slurm.submit(config, run_dir, [*NODES, how], *calm.overrides, *WORDS)
    slurm.wait_until(
        lambda: steps(run_dir) >= 3 or slurm.job(job)["JobState"] not in ("PENDING", "RUNNING"), "step", 300
    )
    assert slurm.job(job)["BatchHost"] == FIRST
    with slurm.patience(NOTICED_S):
        slurm.cluster("crash", FIRST)
        try:
            left = slurm.wait_until(lambda: not slurm.left(run_dir, *OTHERS), "end of the ranks", SILENCE_S + 30)
            assert not any(slurm.cluster("exec", node, "ls", "-A", "/dev/shm").split() for node in OTHERS)
            before = slurm.run(COMMAND, "status", str(run_dir))
            known = slurm.job(job)["JobState"] != "RUNNING"
            slurm.wait_until(lambda: AFTER[how] in slurm.run(COMMAND, "status", str(run_dir)), f"{AFTER[how]}", 120)
            after = slurm.run(COMMAND, "status", str(run_dir))
            print(f"{how}: the ranks were gone after {left:.0f} s\n{before}\n{after}", flush=True)
            number = go_on(slurm, job, how, run_dir, calm.overrides)
            slurm.wait_until(lambda: summary(run_dir)["status"] == "finished", "end of the run", 400)
        finally:
            slurm.restart(FIRST)
    assert known or f"the conductor is gone, say its ranks on {', '.join(OTHERS)}, and have left" in before
    assert slurm.wait_over(number, 60) == ("COMPLETED", 0), said(run_dir)
    assert slurm.job(job)["Restarts"] == ("0" if how == "--no-requeue" else "1")
    (at,) = map(int, re.findall(r"resuming from \S+ at step (\d+)/", said(run_dir)))
    assert at >= 2
    assert timeless(metrics(run_dir)) == calm.metrics


AFTER = {
    "--requeue": "requeued 1 times",
    "--no-requeue": "NODE_FAIL: it lost a node",
    "--no-kill": f"its first node {FIRST} is gone, and with it the conductor: nobody leads the run any more.",
}


def go_on(slurm: Cluster, job: int, how: str, run_dir: Path, overrides: tuple[str, ...]) -> int:
    """Do what `status` says; the job that goes on."""
    if how == "--no-requeue":
        return slurm.submit(CHECKOUT / "sbatch" / "ppo_32b.toml", run_dir, [*NODES, how], *overrides, *WORDS)
    if how == "--no-kill":
        slurm.run("scontrol", "requeue", str(job))
    time.sleep(1.0)
    return job
