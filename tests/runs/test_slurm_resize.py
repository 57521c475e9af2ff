"""A job's checkpoint, resumed by a job with fewer nodes and other ranks in every role that learns."""

from __future__ import annotations

import pytest
from slurm_cluster import CHECKOUT, ENDLESS, Cluster, said
from slurm_undisturbed import calm_run
from training_runs import assert_close_metrics, metrics, steps, summary

from slurm_rlhf.checkpoint.directory import CheckpointDir

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.full]

RESOURCES = ["--gres=gpu:8", "--cpus-per-task=4", "--mem=8000"]
SMALLER = (
    *("--actor.num_nodes=1", "--critic.num_gpus_per_node=2", "--ref.num_gpus_per_node=2", "--ref.zero_stage=3"),
    *("--vllm.num_engines=1", "--vllm.num_nodes=1", "--ckpt.save_steps=1"),
)
COMPARED = 2


def test_a_run_of_four_nodes_goes_on_on_two_until_it_is_cancelled(slurm: Cluster) -> None:
    """Resume with other ranks in every role and fewer nodes: metrics agree to rounding.

    `scancel` leaves the last checkpoint usable, no orphan, and the allocation released.
    """
    calm, run_dir = calm_run(slurm), slurm.shared / "resized"
    config = CHECKOUT / "sbatch" / "ppo_32b.toml"
    resume = f"--resume={calm.run_dir / 'checkpoints' / f'step_{calm.saved_at:06d}'}"
    job = slurm.submit(config, run_dir, ["--nodes=2", *RESOURCES], *calm.overrides, *ENDLESS, *SMALLER, resume)
    slurm.wait_until(
        lambda: steps(run_dir) >= COMPARED or slurm.job(job)["JobState"] not in ("PENDING", "RUNNING"), "steps"
    )
    slurm.run("scancel", str(job))
    assert slurm.wait_over(job)[0] == "CANCELLED", said(run_dir)
    assert summary(calm.run_dir)["world"] == {"actor": 2, "critic": 1, "reference": 1, "rollout": 2}
    assert summary(run_dir)["world"] == {"actor": 1, "critic": 2, "reference": 2, "rollout": 1}
    rows = metrics(calm.run_dir)[calm.saved_at :]
    assert_close_metrics(metrics(run_dir)[:COMPARED], rows[:COMPARED])

    latest = CheckpointDir(run_dir).latest()
    assert latest is not None
    assert CheckpointDir(run_dir).load_state(latest)["run"]["step"] >= calm.saved_at + COMPARED
    slurm.wait_until(lambda: not slurm.left(run_dir, *slurm.names), "end of its processes")
    assert not slurm.run("squeue", "-h").strip()
