"""A run that saves beside its steps, killed again and again while a checkpoint is being written."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from training_runs import metrics, saved, started, steps, timeless, train, workspace

from slurm_rlhf.checkpoint.directory import CheckpointDir

pytestmark = [pytest.mark.full, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]

KILLS, STEPS = 10, 40
WORDS = (
    *("--actor.num_gpus_per_node=2", "--eval.dataset=", "--rollout.batch_size=4", "--train.num_episodes=10"),
    f"--train.max_steps={STEPS}",
)
BEHIND = ("--ckpt.async_save=true", "--ckpt.save_steps=1")


@pytest.mark.parametrize("stage", [2])
def test_killed_while_it_saves_it_writes_the_metrics_of_a_run_left_alone(tmp_path: Path, stage: int) -> None:
    config, draw, during = workspace(tmp_path), random.Random(stage), 0
    words = (*WORDS, f"--ds.zero_stage={stage}")
    code, output = train(config, tmp_path / "whole", *words, warm=True)
    assert code == 0, output
    run_dir = tmp_path / "killed"
    for _ in range(KILLS):
        before = steps(run_dir)
        with started(config, run_dir, *words, *BEHIND, warm=True) as run:
            run.wait_for_step(before + 2)
            run.wait_for_file("checkpoints/step_??????.tmp/*/rank_*")
            time.sleep(draw.uniform(0.0, 0.05))
            run.process.kill()
            run.process.communicate()
            run.assert_gone()
        during += any(run_dir.glob("checkpoints/step_??????.tmp"))
        newest = CheckpointDir(run_dir).resolve("auto")
        assert newest is not None
        assert newest.name == f"step_{max(saved(run_dir)):06d}"  # all that is there under its name is whole
        print(f"killed after step {steps(run_dir)}, goes on from {newest.name}", flush=True)
    assert during > 0
    code, output = train(config, run_dir, *words, *BEHIND, warm=True)
    assert code == 0, output
    assert timeless(metrics(run_dir)) == timeless(metrics(tmp_path / "whole"))
