"""Compare what the recipes learn of one task, a run for each seed, in one table and one picture (recipes.svg).

    python tests/lab/recipes.py sbatch/quickstart.toml
    python tests/lab/recipes.py sbatch/quickstart.toml --shuffle --out=runs/shuffled --seeds=1

With --shuffle the rewards of a batch are permuted: a control experiment, in which there is nothing to learn.
A run that ends early, because dynamic sampling finds no more groups for example, counts as far as it went.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import task
from learn import as_compared, drawn, side_of, train
from learn_curves import Learned, Side, table

from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ConfigError

SHUFFLED = """import functools
import random
import runpy

own = runpy.run_path({file!r})["reward_func"]
draw = random.Random(0)


@functools.wraps(own)
def reward_func(*given, **named):
    answer = own(*given, **named)
    found = answer if isinstance(answer, dict) else {{"rewards": answer}}
    order = draw.sample(range(len(found["rewards"])), len(found["rewards"]))
    return found | {{name: [found[name][row] for row in order] for name in ("rewards", "scores") if name in found}}
"""
"""A reward function that answers another's rewards and scores in an order drawn anew for each batch."""


def main(words: list[str] | None = None) -> int:
    """Train with every recipe, a run of each for every seed, and show what they learned."""
    parser = task.parser(__doc__, recipes="sbatch/recipes", seeds=3, steps=20, every=4, out="runs/recipes")
    parser.add_argument("--shuffle", action="store_true", help="permute the rewards of a batch")
    options, rest = parser.parse_known_args(words)
    return task.printed(lambda: measure(options, *task.layers(rest)), show, options.json)


def measure(options: argparse.Namespace, files: list[str], keys: list[str]) -> dict[str, Any]:
    """Lay the task, files and keys, over each recipe, and train. Raises ConfigError, RunError."""
    configs = {file.stem: configured(file, files, keys, options) for file in recipe_files(options.recipes)}
    out = Path(options.out).absolute()
    task.make_new(out)
    for name, config in configs.items() if options.shuffle else ():
        shuffle(config, out / f"{name}_reward.py")
    runs: dict[str, list[Learned]] = {name: [] for name in configs}
    for seed in range(1, options.seeds + 1):
        for name, config in configs.items():
            runs[name].append(train(config, name, out, seed))
    sides = [Side(name, as_far_as_all(found)) for name, found in runs.items()]
    return drawn("recipes", sides, "accuracy on held-out problems, by recipe", out)


def shuffle(config: Config, file: Path) -> None:
    """Let the reward be that of a function which permutes the user's, called with whole batches.

    The means by which a model is measured stay as they are. Raises ConfigError where no file has the reward.
    """
    if not config.reward.remote_url:
        raise ConfigError("--shuffle permutes the rewards of a file: the task needs reward.remote_url")
    file.write_text(SHUFFLED.format(file=config.reward.remote_url), encoding="utf-8")
    config.reward.remote_url, config.reward.workers = str(file), 0


def show(result: dict[str, Any]) -> str:
    """Write the results for a reader."""
    directory = Path(result["picture"]).parent
    runs = f"every run with its settings: slurm-rlhf report {directory}/*/"
    return f"{table([side_of(each) for each in result['sides']])}\npicture: {result['picture']}\n{runs}"


def as_far_as_all(runs: list[Learned]) -> list[Learned]:
    """Cut the curves of a recipe where the first of its runs ended."""
    end = min(run.points[-1].samples for run in runs)
    return [replace(run, points=[point for point in run.points if point.samples <= end]) for run in runs]


def recipe_files(text: str) -> list[Path]:
    """List the files of `--recipes`: a directory, or files with commas between them. Raises ConfigError."""
    files = [Path(part) for part in text.split(",") if part]
    if len(files) == 1 and files[0].is_dir():
        # A recipe with a reward of its own does not lie under another task.
        files = sorted(file for file in files[0].glob("*.toml") if not load_config(file).reward.preset)
    if not files or len({file.stem for file in files}) < len(files):
        raise ConfigError(f"--recipes={text}: give a directory with .toml files, or files of different names")
    return files


def configured(recipe: Path, files: list[str], keys: list[str], options: argparse.Namespace) -> Config:
    """Lay the task over a recipe. Raises ConfigError, as `check` does."""
    config = load_config([recipe, *files], keys)
    if not config.eval.dataset:
        raise ConfigError(
            "recipes needs a task with eval.dataset, as in: python tests/lab/recipes.py sbatch/quickstart.toml"
        )
    as_compared(config, options.steps, options.every)
    return config


if __name__ == "__main__":
    sys.exit(main())
