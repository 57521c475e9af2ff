"""A job's checkpoint, resumed by a job with fewer nodes and other ranks in every role that learns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from slurm_nodes import SlurmNodes, slurm
from test_slurm_run import config, submit
from training_runs import assert_close_metrics, metrics

__all__ = ["config", "slurm"]
pytestmark = pytest.mark.timeout(300)

SHARED = ("--train.max_steps=4", "--ckpt.save_steps=2", "--ds.zero_stage=3", "--eval.dataset=")
RESOURCES = ["--gres=gpu:8", "--cpus-per-task=4", "--mem=8000"]
SMALLER = (
    *("--actor.num_nodes=1", "--critic.num_gpus_per_node=2", "--ref.num_gpus_per_node=2", "--ref.zero_stage=3"),
    *("--vllm.num_engines=1", "--vllm.num_nodes=1"),
)


def test_a_job_of_three_nodes_goes_on_on_two(slurm: SlurmNodes, config: Path) -> None:
    three, two = slurm.shared / "three", slurm.shared / "two"
    job = submit(slurm, config, three, ["--nodes=3", *RESOURCES], *SHARED)
    assert slurm.wait_over(job, 150) == ("COMPLETED", 0), Path(f"{three}.log").read_text()
    half = three / "checkpoints" / "step_000002"
    job = submit(slurm, config, two, ["--nodes=2", *RESOURCES], *SHARED, *SMALLER, f"--resume={half}")
    assert slurm.wait_over(job, 150) == ("COMPLETED", 0), Path(f"{two}.log").read_text()
    worlds = [json.loads((run / "summary.json").read_text())["world"] for run in (three, two)]
    assert worlds[0] == {"actor": 2, "critic": 1, "reference": 1, "rollout": 2}
    assert worlds[1] == {"actor": 1, "critic": 2, "reference": 2, "rollout": 1}
    assert_close_metrics(metrics(two), metrics(three)[2:])
