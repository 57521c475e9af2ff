"""A run without a reward: the policy comes nearer to a teacher of another size, and resumes exactly."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from tiny_models import make_tiny
from training_runs import finished, metrics, summary, timeless, workspace

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STEPS = 24
KEYS = (
    *("--algo.advantage.estimator=group_norm", "--algo.kl.init_coef=0", "--reward.remote_url=", "--eval.dataset="),
    *("--train.batch_size=32", "--train.max_epochs=1", f"--train.max_steps={STEPS}", "--actor.learning_rate=1e-3"),
    *("--ckpt.save_steps=20", "--ckpt.max_num=9"),
)


@pytest.fixture(scope="module")
def distilled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, tuple[str, ...]]:
    """(configuration, run directory, what was asked for)."""
    folder = tmp_path_factory.mktemp("distilled")
    config = workspace(folder)
    keys = (*KEYS, f"--algo.distill.model_name_or_path={make_tiny(folder / 'teacher', hidden=64, seed=7)}")
    finished(config, folder / "run", *keys)
    return config, folder / "run", keys


def test_the_policy_comes_nearer_to_its_teacher(distilled: tuple[Path, Path, tuple[str, ...]]) -> None:
    run_dir = distilled[1]
    assert summary(run_dir)["world"] == {"actor": 1, "reference": 1, "rollout": 1}
    rows = metrics(run_dir)
    assert {row["reward"] for row in rows} == {0.0}
    gaps = [row["teacher_gap"] for row in rows]
    assert gaps[0] < 0
    assert statistics.mean(gaps[-4:]) > 0.75 * gaps[0]


def test_resumed_it_writes_the_same_metrics(distilled: tuple[Path, Path, tuple[str, ...]], tmp_path: Path) -> None:
    config, run_dir, keys = distilled
    first = run_dir / "checkpoints" / "step_000020"
    finished(config, tmp_path / "resumed", *keys, f"--resume={first}")
    assert timeless(metrics(tmp_path / "resumed")) == timeless(metrics(run_dir)[20:])
