"""`tests/lab/recipes.py`, its runs imitated: the table, the picture, runs that end early, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import learn
import pytest
import recipes
import task
from learn_curves import Learned, Point, Side, table

from slurm_rlhf.config.load import load_config
from slurm_rlhf.errors import RunError

SBATCH = Path(__file__).parents[2] / "sbatch"
GAIN = {"grpo": 0.4, "rloo": 0.3}
WHY = "step 7: dynamic sampling kept 121 of 1280 groups"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the runs that were started; each leaves the files of a run that has learned; rloo_2 ends early."""
    started: list[str] = []

    def train(command: list[str], log: Path, read: Callable[[str], None]) -> None:
        config = load_config(command[-1])
        place = Path(config.run_dir)
        place.mkdir()
        started.append(place.name)
        last = 6 if place.name == "rloo_2" else config.train.max_steps
        after = 0.5 + GAIN[place.name.rpartition("_")[0]] + config.train.seed / 100
        rows: list[dict[str, Any]] = [{"step": step, "time/step": 2.0} for step in range(1, last + 1)]
        for row in rows[config.eval.steps - 1 :: config.eval.steps]:
            row |= {"eval": 0.5 if row["step"] < config.train.max_steps else after, "time/step": 3.0, "time/eval": 1.0}
        (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (place / "layout.json").write_text(json.dumps({"ranks": {}}))
        summary = {"status": "finished", "eval_before": 0.5, "eval_after": after}
        read(f"   1/{config.train.max_steps} reward 0.5")
        if last < config.train.max_steps:
            (place / "summary.json").write_text(json.dumps(summary | {"status": "failed", "error": WHY}))
            raise RunError("-m slurm_rlhf.cli train ended with 1")
        (place / "summary.json").write_text(json.dumps(summary))

    monkeypatch.setattr(task, "run_process", train)
    monkeypatch.setattr(learn, "check", lambda config: None)  # it wants the task's files
    monkeypatch.setattr(learn.RankMap, "from_json", lambda ranks: None)
    monkeypatch.setattr(learn, "processes", lambda config, ranks, cpus: "")
    return started


def bench(out: Path, *words: str) -> int:
    files = ",".join(str(SBATCH / "recipes" / f"{name}.toml") for name in GAIN)
    fixed = [str(SBATCH / "quickstart.toml"), f"--recipes={files}", "--steps=8", f"--out={out}"]
    return recipes.main([*fixed, *words])


def test_every_recipe_runs_with_every_seed_and_one_that_ends_early_counts_as_far_as_it_went(
    started: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(tmp_path / "out", "--seeds=2", "--reward.shuffle=true") == 0
    assert started == ["grpo_1", "rloo_1", "grpo_2", "rloo_2"]
    text, told = capsys.readouterr()
    assert f"rloo_2 ended early, and counts as far as it went: {WHY}\n" in told
    assert [line.split() for line in text.splitlines()[:3]] == [
        ["recipe", "before", "seed", "1", "seed", "2", "mean", "area", "seconds"],
        ["grpo", "0.500", "0.910", "0.920", "0.915", "0.604", "16.0"],
        ["rloo", "0.500", "0.500", "0.500", "0.500", "0.500", "8.0"],
    ]
    assert "accuracy after 4,096 responses" in text  # 8 steps of 128 prompts x 4
    assert "rloo: after 2,048 responses, the last that all of its runs reached\n" in text
    assert (tmp_path / "out" / "recipes.svg").read_text().count("<polyline") == 2 * 2 * (2 + 1)
    # The task lies over the recipe, and keys over both.
    config = load_config(tmp_path / "out" / "rloo_1.toml")
    assert (config.algo.advantage.estimator, config.algo.kl.init_coef) == ("rloo", 0.03)
    assert (config.rollout.batch_size, config.reward.shuffle, config.eval.steps) == (128, True, 4)


def test_a_run_that_fails_without_a_curve_ends_the_bench(
    started: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(command: list[str], log: Path, read: Callable[[str], None]) -> None:
        raise RunError("-m slurm_rlhf.cli train ended with 1")

    monkeypatch.setattr(task, "run_process", train)
    assert bench(tmp_path / "out", "--seeds=1") == 1
    assert "train ended with 1" in capsys.readouterr().err


def test_the_area_is_the_mean_over_samples_however_they_are_spaced() -> None:
    early = Side("a", [Learned(1, [Point(0, 0, 0.5), Point(100, 1, 0.9), Point(400, 4, 0.9)], 0.0)])
    late = Side("b", [Learned(1, [Point(0, 0, 0.5), Point(300, 3, 0.5), Point(400, 4, 0.9)], 0.0)])
    assert early.area() == pytest.approx((0.7 * 100 + 0.9 * 300) / 400)
    assert "0.550" in table([early, late])


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--recipes="], "give a directory with .toml files, or files of different names"),
        (["--recipes=a/x.toml,b/x.toml"], "files of different names"),
        (["--eval.dataset="], "needs a task with eval.dataset"),
        (["--out=.."], "holds something already: give a new directory"),
    ],
)
def test_what_the_user_has_to_mend(
    words: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learn, "check", lambda config: None)
    monkeypatch.chdir(tmp_path)
    assert bench(tmp_path / "out", *words) == 2
    assert named in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
