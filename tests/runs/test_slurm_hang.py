"""A hang under a real slurmctld: it is told, the job is requeued, and the run ends with the numbers of a calm one."""

from __future__ import annotations

import re

import pytest
from holds import Holds
from slurm_cluster import SMALL, Cluster, said
from training_runs import metrics, steps, summary, timeless, train, workspace
from waiting import scaled

from slurm_rlhf.observe.run_log import read_events

# Behind -m full for its time: a whole run, twice started.
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.full]

STEPS = 12
LENGTH = (f"--train.max_steps={STEPS}", "--train.num_episodes=4", "--train.threads_per_rank=1")
HANG = ("--train.on_hang=restart", f"--timeout.hang={scaled(5)}", f"--timeout.hang_grace={scaled(6)}")


def test_a_run_that_hangs_is_requeued_and_ends_with_the_same_metrics(slurm: Cluster) -> None:
    """The reward function never answers in a step: trainers and engines have nothing to do, so all is saved."""
    config = workspace(slurm.shared / "hanging")
    holds = Holds(config)
    calm = config.parent / "calm"
    code, output = train(config, calm, *SMALL, *LENGTH, "--actor.num_gpus_per_node=2", warm=True)
    assert code == 0, output

    run_dir = slurm.shared / "hung"
    job = slurm.submit(
        config,
        run_dir,
        ["--nodes=2", "--gres=gpu:8", "--cpus-per-task=4", "--mem=8000", "--requeue"],
        *(*SMALL, *LENGTH, *HANG),
    )
    slurm.wait_until(lambda: steps(run_dir) >= 4, "step 4")
    holds.hold("reward-hang")
    told_s = slurm.wait_until(lambda: any(run_dir.glob("hang-*/nodes.txt")), "report of the hang")
    requeued_s = slurm.wait_until(lambda: slurm.job(job)["Restarts"] == "1", "requeue")
    print(f"told after {told_s:.1f} s, requeued {requeued_s:.1f} s later")
    saved = summary(run_dir)
    (place,) = run_dir.glob("hang-*")
    assert saved["status"] == "stopped"
    assert place.name == f"hang-{saved['steps'] + 1}"
    assert "behind is the reward function, at reward_func" in (place / "report.txt").read_text()
    gone = slurm.wait_until(lambda: not any(slurm.left(run_dir, node) for node in slurm.names), "end of its processes")
    assert gone < 30
    holds.let_go("reward-hang")
    slurm.start_soon(job)
    assert slurm.wait_over(job) == ("COMPLETED", 0), said(run_dir)

    assert f"stopped by a hang in phase reward of step {saved['steps'] + 1}: " in said(run_dir)
    assert re.search(rf"resuming from .*step_0*{saved['steps']} at step {saved['steps']}/{STEPS}", said(run_dir))
    assert summary(run_dir)["status"] == "finished"
    assert timeless(metrics(run_dir)) == timeless(metrics(calm))
    kinds = [one.event for one in read_events(run_dir / "events.jsonl") if one.event not in ("warning", "checkpoint")]
    assert kinds == ["start", "hang", "stop", "requeue", "resume", "finish"]
    assert place.is_dir()  # it stays for whoever looks for the reason
