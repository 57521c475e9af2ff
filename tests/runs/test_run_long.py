"""Runs of many steps: no process grows, nothing stays open, and what is written at each step costs the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from process_samples import (
    MB,
    History,
    cpu_per_100,
    memory_slope,
    more,
    size,
    slope_per_100,
    table,
)
from slurm_cluster import OVER, Cluster, said
from training_runs import metrics, started, workspace

STEPS, WARM = 2000, 500
SLURM_STEPS, SLURM_WARM = 700, 500
KEPT = 3  # ckpt.max_num
RECORDS = 20_000  # bytes of a step's metrics, in JSON and for TensorBoard, and of its samples
LONG = (
    *("--rollout.batch_size=2", "--rollout.n_samples_per_prompt=4", "--train.batch_size=8"),
    *("--rollout.max_new_tokens=4", "--eval.dataset=", "--train.num_episodes=1000", "--logger.progress=none"),
    *("--ckpt.save_steps=25", f"--ckpt.max_num={KEPT}", "--ckpt.async_save=true"),
)
CHEAP = ("--algo.advantage.estimator=group_norm", "--algo.kl.init_coef=0")

real = (pytest.mark.full, pytest.mark.engine, pytest.mark.slow)


def marked(*parameters: object, limit_s: int) -> list[object]:
    return [pytest.param(each, marks=[*real, pytest.mark.timeout(limit_s)]) for each in parameters]


def assert_flat(history: History, run_dir: Path, steps: int, warm: int) -> None:
    """Every process after its warm-up, and the run directory."""
    found = history.whole(warm)
    print(f"\n{table(found)}")
    assert len(metrics(run_dir)) == steps
    roles = {name.rpartition(" ")[0] for name in found}
    assert {"conductor", "rank of actor", "rank of rollout"} <= roles  # under Slurm ranks are started by no torchrun
    for name, samples in found.items():
        assert memory_slope(samples) < 1.0, name
        assert more(samples) == {}, name
    (conductor,) = (samples for name, samples in found.items() if name.startswith("conductor"))
    before, after = cpu_per_100(conductor)
    assert after < 1.5 * before
    checkpoint = max(size(path) for path in (run_dir / "checkpoints").glob("step_??????"))
    disk = [each for each in history.disk if each[0] >= warm]
    print(f"checkpoint {checkpoint / MB:.1f} MB; without records {disk[0][2] / MB:.1f} -> {disk[-1][2] / MB:.1f} MB")
    assert max(others for _, _, others in disk) < (KEPT + 2) * checkpoint + 3 * MB
    assert slope_per_100([(step, records) for step, records, _ in disk]) < 100 * RECORDS


@pytest.mark.parametrize("more_words", marked((), CHEAP, limit_s=3000), ids=str)
def test_two_thousand_steps(tmp_path: Path, more_words: tuple[str, ...]) -> None:
    """PPO with all of its roles, and group_norm, which has actor and engine only."""
    run_dir, history = tmp_path / "run", History()
    words = (*LONG, f"--train.max_steps={STEPS}", *more_words)
    with started(workspace(tmp_path), run_dir, *words) as run:
        history.follow(run_dir, 10, lambda: run.process.poll() is not None)
        code, output = run.wait()
    assert code == 0, output
    assert_flat(history, run_dir, STEPS, WARM)


@pytest.mark.parametrize("nodes", marked(3, limit_s=1200))
def test_many_steps_under_slurm(slurm: Cluster, nodes: int) -> None:
    run_dir, history = slurm.shared / "long", History()
    config = workspace(slurm.shared / "long_work")
    options = [f"--nodes={nodes}", "--gres=gpu:8", "--cpus-per-task=4", "--mem=8000"]
    words = (*LONG, *CHEAP, "--vllm.num_engines=1", "--vllm.num_nodes=1", f"--train.max_steps={SLURM_STEPS}")
    job = slurm.submit(config, run_dir, options, *words)
    history.follow(run_dir, 2, lambda: slurm.job(job)["JobState"] in OVER)
    assert slurm.wait_over(job) == ("COMPLETED", 0), said(run_dir)
    assert_flat(history, run_dir, SLURM_STEPS, SLURM_WARM)
