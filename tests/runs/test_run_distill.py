"""A run without a reward: the policy comes nearer to a teacher of another size, and resumes exactly."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from tiny_models import make_tiny
from training_runs import metrics, summary, timeless, train, workspace

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STEPS = 24
KEYS = (
    *("--algo.advantage.estimator=group_norm", "--algo.kl.init_coef=0", "--reward.remote_url=", "--eval.dataset="),
    *("--train.batch_size=32", "--train.max_epochs=1", f"--train.max_steps={STEPS}", "--actor.learning_rate=1e-3"),
    *("--ckpt.save_steps=20", "--ckpt.max_num=9"),
)


def test_the_policy_comes_nearer_to_its_teacher(tmp_path: Path) -> None:
    config = workspace(tmp_path)
    teacher = make_tiny(tmp_path / "teacher", hidden=64, seed=7)
    keys = (*KEYS, f"--algo.distill.model_name_or_path={teacher}")
    code, output = train(config, tmp_path / "run", *keys, warm=True)
    assert code == 0, output
    assert summary(tmp_path / "run")["world"] == {"actor": 1, "reference": 1, "rollout": 1}
    rows = metrics(tmp_path / "run")
    assert {row["reward"] for row in rows} == {0.0}
    gaps = [row["teacher_gap"] for row in rows]
    assert gaps[0] < 0
    assert statistics.mean(gaps[-4:]) > 0.75 * gaps[0]
    first = tmp_path / "run" / "checkpoints" / "step_000020"
    code, output = train(config, tmp_path / "resumed", *keys, f"--resume={first}", warm=True)
    assert code == 0, output
    assert timeless(metrics(tmp_path / "resumed")) == timeless(rows[20:])
