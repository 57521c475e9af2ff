"""The scripts that compare whole runs and break them, run as a user runs them, on tiny models."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import fault_campaign
import learn
import pytest
import recipes
from programs import completed
from training_runs import workspace

pytestmark = [pytest.mark.full]

SBATCH = Path(__file__).parents[2] / "sbatch"
TASK = (
    *("--actor.model_name_or_path=model", "--data.prompt_dataset=prompts.jsonl", "--eval.dataset=eval.jsonl"),
    *("--steps=2", "--every=1", "--out=out", "--train.batch_size=32", "--seeds=1"),
)


def python(directory: Path, *words: str | Path) -> str:
    """Run a script in a directory and return what it prints."""
    done = completed([sys.executable, *words], cwd=directory, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def test_learn(tmp_path: Path) -> None:
    workspace(tmp_path)
    words = (SBATCH / "recipes" / "grpo.toml", SBATCH / "quickstart.toml", "--rollout.n_samples_per_prompt=8")
    assert "accuracy after" in python(tmp_path, learn.__file__, *words, *TASK, "--no-peer")
    assert (tmp_path / "out" / "learn.svg").is_file()


def test_recipes(tmp_path: Path) -> None:
    workspace(tmp_path)
    words = (SBATCH / "quickstart.toml", f"--recipes={SBATCH}/recipes/rloo.toml", "--rollout.batch_size=8")
    assert "\nrloo " in python(tmp_path, recipes.__file__, *words, *TASK)
    assert (tmp_path / "out" / "recipes.svg").is_file()


def test_a_campaign(tmp_path: Path) -> None:
    assert "as it should be: 1 of 1" in python(tmp_path, fault_campaign.__file__, "--faults=1")
    assert (tmp_path / "campaign" / "campaign.json").is_file()
