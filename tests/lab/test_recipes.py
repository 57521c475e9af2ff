"""`tests/lab/recipes.py`, its runs imitated: the table, the picture, what is not repeated, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import recipes
import task
from learn_curves import Learned, Point, Side
from recipes import area, recipe_files, table

from slurm_rlhf.config.load import load_config
from slurm_rlhf.errors import RunError

SBATCH = Path(__file__).parents[2] / "sbatch"
GAIN = {"grpo": 0.4, "rloo": 0.3}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the runs that were started; each leaves the files of a run that has learned."""
    started: list[str] = []

    def train(command: list[str], log: Path) -> None:
        config = load_config(command[-1])
        place = Path(config.run_dir)
        place.mkdir(exist_ok=True)
        started.append(place.name)
        (place / "config.toml").write_text(Path(command[-1]).read_text())
        after = 0.5 + GAIN[place.name.rpartition("_")[0]] + config.train.seed / 100
        steps = range(1, config.train.max_steps + 1)
        rows: list[dict[str, Any]] = [{"step": step, "time/step": 2.0} for step in steps]
        for row in rows[config.eval.steps - 1 :: config.eval.steps]:
            row |= {"eval": 0.5 if row["step"] < config.train.max_steps else after, "time/step": 3.0, "time/eval": 1.0}
        (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        summary = {"status": "finished", "eval_before": 0.5, "eval_after": after, "wall_s": 60.0}
        (place / "summary.json").write_text(json.dumps(summary))

    monkeypatch.setattr(task, "run_process", train)
    monkeypatch.setattr(recipes, "check", lambda config: None)  # it wants the task's files
    return started


def bench(out: Path, *words: str) -> int:
    files = ",".join(str(SBATCH / "recipes" / f"{name}.toml") for name in GAIN)
    fixed = [str(SBATCH / "quickstart.toml"), f"--recipes={files}", "--steps=8", f"--out={out}"]
    return recipes.main([*fixed, *words])


def test_every_recipe_runs_with_every_seed_and_none_twice(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert bench(out, "--seeds=2") == 0
    assert runs == ["grpo_1", "rloo_1", "grpo_2", "rloo_2"]
    text = capsys.readouterr().out.splitlines()
    assert [line.split() for line in text[:3]] == [
        ["recipe", "before", "seed", "1", "seed", "2", "mean", "area", "seconds"],
        ["grpo", "0.500", "0.910", "0.920", "0.915", "0.604", "16.0"],
        ["rloo", "0.500", "0.810", "0.820", "0.815", "0.579", "16.0"],
    ]
    assert text[3].startswith("accuracy after 4,096 responses")  # 8 steps of 128 prompts x 4
    assert (out / "recipes.svg").read_text().count("<polyline") == 2 * 2 * (2 + 1)
    assert f"slurm-rlhf report {out}/*/" in text[-1]

    assert bench(out, "--seeds=3", "--json") == 0
    assert runs[4:] == ["grpo_3", "rloo_3"]
    sides = json.loads(capsys.readouterr().out)["sides"]
    assert {side["name"]: [run["seed"] for run in side["runs"]] for side in sides} == {
        "grpo": [1, 2, 3],
        "rloo": [1, 2, 3],
    }


def test_the_task_lies_over_the_recipe_and_keys_over_both(runs: list[str], tmp_path: Path) -> None:
    assert bench(tmp_path / "out", "--seeds=1", "--reward.shuffle=true", "--every=2") == 0
    config = load_config(tmp_path / "out" / "rloo_1" / "config.toml")
    assert (config.algo.advantage.estimator, config.algo.kl.init_coef) == ("rloo", 0.03)
    assert (config.rollout.batch_size, config.reward.shuffle, config.eval.steps) == (128, True, 2)


def test_a_finished_run_of_other_keys_is_not_taken_for_this_one(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(tmp_path, "--seeds=1") == 0
    assert bench(tmp_path, "--seeds=1", "--actor.learning_rate=1e-5", "--every=8") == 2
    told = capsys.readouterr().err
    assert "grpo_1 is a finished run with other values of actor.learning_rate, eval.steps" in told
    assert len(runs) == 2


def test_a_run_that_was_broken_off_is_started_again(runs: list[str], tmp_path: Path) -> None:
    assert bench(tmp_path, "--seeds=1") == 0
    (tmp_path / "rloo_1" / "summary.json").write_text(json.dumps({"status": "stopped"}))
    assert bench(tmp_path, "--seeds=1") == 0
    assert runs == ["grpo_1", "rloo_1", "rloo_1"]


def test_a_run_that_ends_early_counts_as_far_as_it_went_and_ends_no_bench(
    runs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = task.run_process
    why = "step 7: dynamic sampling kept 121 of 1280 groups"

    def train(command: list[str], log: Path) -> None:
        whole(command, log)
        place = Path(load_config(command[-1]).run_dir)
        if place.name == "rloo_2":
            rows = (place / "metrics.jsonl").read_text().splitlines(keepends=True)
            (place / "metrics.jsonl").write_text("".join(rows[:6]))
            summary = json.loads((place / "summary.json").read_text())
            (place / "summary.json").write_text(json.dumps(summary | {"status": "failed", "error": why}))
            raise RunError("-m slurm_rlhf.cli train ended with 1")

    monkeypatch.setattr(task, "run_process", train)
    assert bench(tmp_path / "out", "--seeds=2", "--every=4") == 0
    text, told = capsys.readouterr()
    assert f"rloo_2 ended early, and counts as far as it went: {why}\n" in told
    cells = {words[0]: words[1:] for line in text.splitlines() if (words := line.split())}
    assert cells["grpo"] == ["0.500", "0.910", "0.920", "0.915", "0.604", "16.0"]
    assert cells["rloo"] == ["0.500", "0.500", "0.500", "0.500", "0.500", "8.0"]
    assert "rloo: after 2,048 responses, the last that all of its runs reached\n" in text
    assert (tmp_path / "out" / "recipes.svg").exists()


def test_a_run_that_fails_without_a_curve_ends_the_bench(
    runs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(command: list[str], log: Path) -> None:
        raise RunError("-m slurm_rlhf.cli train ended with 1")

    monkeypatch.setattr(task, "run_process", train)
    assert bench(tmp_path / "out", "--seeds=1") == 1
    assert "train ended with 1" in capsys.readouterr().err


def test_the_area_is_the_mean_over_samples_however_they_are_spaced() -> None:
    early = Side("a", [Learned(1, [Point(0, 0, 0.5), Point(100, 1, 0.9), Point(400, 4, 0.9)], 0.0)])
    late = Side("b", [Learned(1, [Point(0, 0, 0.5), Point(300, 3, 0.5), Point(400, 4, 0.9)], 0.0)])
    assert area(early) == pytest.approx((0.7 * 100 + 0.9 * 300) / 400)
    assert area(late) == pytest.approx((0.5 * 300 + 0.7 * 100) / 400)
    assert "0.850" in table([early, late])
    assert "0.550" in table([early, late])


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--recipes="], "no recipe (a directory with .toml files, or files)"),
        (["--recipes=nowhere.toml"], "nowhere.toml: no such file"),
        (["--recipes=a/x.toml,b/x.toml"], "two files are called x"),
        (["--eval.dataset="], "needs a task with eval.dataset"),
    ],
)
def test_what_the_user_has_to_mend(
    words: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(tmp_path / "out", *words) == 2
    out, err = capsys.readouterr()
    assert (out, "Traceback" in err) == ("", False)
    assert named in err
    assert not (tmp_path / "out").exists()


def test_a_directory_gives_all_of_its_recipes() -> None:
    names = [file.stem for file in recipe_files(str(SBATCH / "recipes"))]
    assert names == sorted(names)
    assert len(names) == 9
