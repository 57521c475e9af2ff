"""What each recipe learns of one task, a run for each seed, in one table and one picture (recipes.svg).

    python tests/lab/recipes.py sbatch/quickstart.toml
    python tests/lab/recipes.py sbatch/quickstart.toml --reward.shuffle=true --out=runs/shuffled --seeds=1

A run that is finished in the output directory is not repeated, so a bench that was broken off goes on. A run that ends
early, because dynamic sampling finds no more groups for example, counts as far as it went.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import task
from learn import drawn, points_of, side_of
from learn_curves import Learned, Side

from slurm_rlhf.config.check import check
from slurm_rlhf.config.key_text import dump_toml
from slurm_rlhf.config.keys import all_keys, get
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ConfigError, RunError
from slurm_rlhf.run_directory import RunDirectory


def main(words: list[str] | None = None) -> int:
    """Train with every recipe, a run of each for every seed, and show what they learned."""
    parser = task.parser(__doc__, recipes="sbatch/recipes", seeds=3, steps=20, every=4, out="runs/recipes")
    options, rest = parser.parse_known_args(words)
    return task.printed(lambda: measure(options, *task.layers(rest)), show, options.json)


def measure(options: argparse.Namespace, files: list[str], keys: list[str]) -> dict[str, Any]:
    """Lay the task, files and keys, over each recipe, and train. Raises ConfigError, RunError."""
    configs = {file.stem: configured(file, files, keys, options) for file in recipe_files(options.recipes)}
    out = Path(options.out).absolute()
    out.mkdir(parents=True, exist_ok=True)
    runs: dict[str, list[Learned]] = {name: [] for name in configs}
    for seed in range(1, options.seeds + 1):
        for name, config in configs.items():
            runs[name].append(_learned(name, config, seed, out))
    sides = [Side(name, as_far_as_all(found)) for name, found in runs.items()]
    return drawn("recipes", sides, "accuracy on held-out problems, by recipe", out)


def show(result: dict[str, Any]) -> str:
    """Write the results for a reader."""
    directory = Path(result["picture"]).parent
    runs = f"every run with its settings: slurm-rlhf report {directory}/*/"
    return f"{table([side_of(each) for each in result['sides']])}\npicture: {result['picture']}\n{runs}"


def table(sides: list[Side]) -> str:
    """Write the accuracy of each recipe before training and after it, by seed, and what lies between.

    `area`: the mean accuracy over all samples, lines between the evaluations; it tells early learning from late.
    """
    seeds = "".join(f"{f'seed {run.seed}':>8}" for run in sides[0].runs)
    width = max(8, *(len(side.name) for side in sides))
    lines = [f"{'recipe':<{width}}{'before':>8}{seeds}{'mean':>8}{'area':>8}{'seconds':>9}"]
    for side in sides:
        curve = side.mean()
        after = [run.points[-1].accuracy for run in side.runs]
        numbers = [curve[0].accuracy, *after, mean(after), area(side)]
        cells = "".join(f"{number:8.3f}" for number in numbers)
        lines.append(f"{side.name:<{width}}{cells}{curve[-1].seconds:9.1f}")
    ends = {side.name: side.runs[0].points[-1].samples for side in sides}
    last = max(ends.values())
    lines.append(f"accuracy after {last:,} responses; seconds of training are means, without start-up and evaluations")
    lines += [
        f"{name}: after {end:,} responses, the last that all of its runs reached"
        for name, end in ends.items()
        if end < last
    ]
    return "\n".join(lines)


def as_far_as_all(runs: list[Learned]) -> list[Learned]:
    """Cut the curves of a recipe where the first of its runs ended."""
    end = min(run.points[-1].samples for run in runs)
    return [replace(run, points=[point for point in run.points if point.samples <= end]) for run in runs]


def area(side: Side) -> float:
    """Average the mean curve of a side over its samples."""
    points = side.mean()
    whole = sum((b.samples - a.samples) * (a.accuracy + b.accuracy) / 2 for a, b in itertools.pairwise(points))
    return whole / max(points[-1].samples, 1)


def recipe_files(text: str) -> list[Path]:
    """List the files of `--recipes`: a directory, or files with commas between them. Raises ConfigError."""
    files = [Path(part) for part in text.split(",") if part]
    if len(files) == 1 and files[0].is_dir():
        files = sorted(files[0].glob("*.toml"))
    if not files:
        raise ConfigError(f"--recipes={text}: no recipe (a directory with .toml files, or files)")
    names = [file.stem for file in files]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"--recipes={text}: two files are called {', '.join(sorted(twice))}")
    return files


def configured(recipe: Path, files: list[str], keys: list[str], options: argparse.Namespace) -> Config:
    """Lay the task over a recipe. Raises ConfigError, as `check` does."""
    config = load_config([recipe, *files], keys)
    if not config.eval.dataset:
        raise ConfigError(
            "recipes needs a task with eval.dataset, as in: python tests/lab/recipes.py sbatch/quickstart.toml"
        )
    config.train.max_steps, config.eval.steps = options.steps, options.every
    check(config)
    return config


def _learned(name: str, config: Config, seed: int, out: Path) -> Learned:
    """Train, unless the run is there, and read its curve."""
    mine = deepcopy(config)
    mine.train.seed, mine.run_dir = seed, str(out / f"{name}_{seed}")
    place = RunDirectory(Path(mine.run_dir))
    if not _is_finished(place, mine):
        file = out / f"{name}_{seed}.toml"
        file.write_text(dump_toml(mine), encoding="utf-8")
        _train(file, place, out / f"{name}_{seed}.log")
    summary = _summary(place)
    rows = [json.loads(line) for line in place.metrics.read_text(encoding="utf-8").splitlines()]
    points = points_of(rows, summary["eval_before"], mine.rollout.batch_size * mine.rollout.n_samples_per_prompt)
    print(f"{name}, seed {seed}: {points[0].accuracy:.3f} before, {points[-1].accuracy:.3f} after")
    return Learned(seed, points, summary["wall_s"] - sum(row["time/step"] for row in rows))


def _train(file: Path, place: RunDirectory, log: Path) -> None:
    """Run to the end, or as far as it goes. Raises RunError where it fails without a curve."""
    try:
        task.run_process([*task.TRAIN, str(file)], log)
    except RunError:
        summary = _summary(place) if place.summary.exists() else {}
        if "error" not in summary or summary.get("eval_after") is None:
            raise
        print(f"{place.root.name} ended early, and counts as far as it went: {summary['error']}")


def _is_finished(place: RunDirectory, config: Config) -> bool:
    """Tell whether the run was done. Raises ConfigError where it was done with other keys."""
    if not place.summary.exists() or _summary(place)["status"] != "finished":
        return False
    done = load_config(place.config)
    if other := [name for name in all_keys() if get(done, name) != get(config, name)]:
        raise ConfigError(
            f"{place.root} is a finished run with other values of {', '.join(other)}: "
            "choose another --out, or remove it"
        )
    return True


def _summary(place: RunDirectory) -> Mapping[str, Any]:
    return dict(json.loads(place.summary.read_text(encoding="utf-8")))


if __name__ == "__main__":
    sys.exit(main())
