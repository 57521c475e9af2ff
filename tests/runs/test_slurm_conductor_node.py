"""The node of the batch script crashes, and with it the conductor: what is left of the job ends it, or Slurm does."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from slurm_cluster import CHECKOUT, COMMAND, Cluster, said
from slurm_undisturbed import STEPS, calm_run
from training_runs import metrics, steps, summary, timeless
from waiting import scaled

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(900)]

NODES = ["--nodes=3", "--gres=gpu:8", "--cpus-per-task=4", "--mem=8000"]
FIRST, OTHERS = "gpu001", ("gpu002", "gpu003")
SILENCE_S = scaled(12.0)
WORDS = (
    *("--ckpt.save_steps=2", f"--train.max_steps={STEPS}", "--train.num_episodes=10"),
    *(f"--timeout.heartbeat={SILENCE_S:g}", "--timeout.heartbeat_interval=0.5"),
)
NOTICED_S = 20
"""In place of SlurmdTimeout's 300 s."""
CANCELLED = ("--no-kill", "--no-requeue")


@pytest.mark.parametrize("how", [("--requeue",), ("--no-requeue",), ("--no-kill",), CANCELLED], ids="".join)
def test_the_ranks_leave_by_themselves_and_the_run_goes_on_from_its_checkpoint(
    slurm: Cluster, how: tuple[str, ...]
) -> None:
    """Slurm starts the job again without that node, with `--no-kill` another node asks for it; else a user does.

    The metrics are those of the calm run, bit for bit; `status` says what happened before and after Slurm knows it.
    """
    calm, run_dir = calm_run(slurm), slurm.shared / f"headless{''.join(how)}"
    job = started(slurm, run_dir, how, calm.overrides)
    assert slurm.job(job)["BatchHost"] == FIRST
    with slurm.patience(NOTICED_S):
        slurm.cluster("crash", FIRST)
        try:
            slurm.wait_until(lambda: not slurm.left(run_dir, *OTHERS), "end of the ranks")
            assert not any(slurm.cluster("exec", node, "ls", "-A", "/dev/shm").split() for node in OTHERS)
            before = slurm.run(COMMAND, "status", str(run_dir))
            known = slurm.job(job)["JobState"] != "RUNNING"
            slurm.wait_until(lambda: AFTER[how] in slurm.run(COMMAND, "status", str(run_dir)), f"{AFTER[how]}")
            number = job
            if "--no-requeue" in how:
                number = slurm.submit(
                    CHECKOUT / "sbatch" / "ppo_32b.toml", run_dir, [*NODES, *how], *calm.overrides, *WORDS
                )
            else:
                requeued(slurm, job)
            slurm.wait_until(lambda: summary(run_dir)["status"] == "finished", "end of the run")
        finally:
            slurm.restart(FIRST)
    assert known or f"the conductor is gone: its ranks on {', '.join(OTHERS)} say so, and have ended" in before
    assert slurm.wait_over(number) == ("COMPLETED", 0), said(run_dir)
    assert slurm.job(job)["Restarts"] == ("0" if "--no-requeue" in how else "1")
    (at,) = map(int, re.findall(r"resuming from \S+ at step (\d+)/", said(run_dir)))
    assert at >= 2
    assert timeless(metrics(run_dir)) == calm.metrics
    assert slurm.left(run_dir, *slurm.names) == []


AFTER = {
    ("--requeue",): "requeued 1 times",
    ("--no-requeue",): "NODE_FAIL: it lost a node",
    ("--no-kill",): "has requeued it",
    CANCELLED: "has cancelled it",
}


def started(slurm: Cluster, run_dir: Path, options: tuple[str, ...], overrides: tuple[str, ...]) -> int:
    """A job that has done three steps."""
    job = slurm.submit(CHECKOUT / "sbatch" / "ppo_32b.toml", run_dir, [*NODES, *options], *overrides, *WORDS)
    slurm.wait_until(lambda: steps(run_dir) >= 3 or slurm.job(job)["JobState"] not in ("PENDING", "RUNNING"), "step")
    return job


def requeued(slurm: Cluster, job: int) -> None:
    """Wait until a job is back in the queue, and spare it the pause there; while it completes it takes no update."""
    slurm.wait_until(lambda: slurm.job(job)["JobState"] == "PENDING", "end of the first start")
    slurm.start_soon(job)


def test_a_conductor_that_is_killed_alone_ends_its_job_and_nobody_requeues_it(slurm: Cluster) -> None:
    """With `--no-kill`, on a node that lives: its batch script is over, and Slurm ends what waits on other nodes."""
    run_dir = slurm.shared / "killed_alone"
    job = started(slurm, run_dir, ("--no-kill",), calm_run(slurm).overrides)
    os.kill(conductor(slurm, run_dir), signal.SIGKILL)
    assert slurm.wait_over(job) == ("FAILED", 0)
    slurm.wait_until(lambda: not slurm.left(run_dir, *slurm.names), "end of its processes")
    assert slurm.job(job)["Restarts"] == "0"
    assert list((run_dir / ".control").glob("headless.*")) == []


def test_a_first_node_that_is_back_before_slurm_misses_it_costs_one_requeue(slurm: Cluster) -> None:
    """It was rebooted: its slurmd says that the batch script is gone, and Slurm itself requeues the job."""
    run_dir = slurm.shared / "rebooted"
    job = started(slurm, run_dir, ("--no-kill",), calm_run(slurm).overrides)
    slurm.cluster("crash", FIRST)
    try:
        slurm.wait_until(lambda: not slurm.left(run_dir, *OTHERS), "end of the ranks")
        assert slurm.agents(*OTHERS)  # they wait
    finally:
        slurm.restart(FIRST)
    slurm.wait_until(lambda: slurm.job(job)["Restarts"] == "1", "requeue")
    slurm.wait_until(lambda: not slurm.agents(*OTHERS), "end of what waits")
    requeued(slurm, job)
    slurm.wait_until(lambda: "resuming from" in said(run_dir), "next start")
    assert slurm.job(job)["Restarts"] == "1"
    assert list((run_dir / ".control").glob("headless.*")) == []
    slurm.run("scancel", str(job))
    slurm.wait_until(lambda: not slurm.left(run_dir, *slurm.names), "end of its processes")


def conductor(slurm: Cluster, run_dir: Path) -> int:
    """Its process id."""
    lines = slurm.numbered(FIRST)
    return min(
        pid for pid, line in lines if f"--run_dir={run_dir}" in line and " train " in line and "srun" not in line
    )
