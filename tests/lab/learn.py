"""Compare how fast a run and TRL's GRPO learn, on the same model, data, reward and samples.

    python tests/lab/learn.py sbatch/recipes/grpo.toml sbatch/quickstart.toml --rollout.n_samples_per_prompt=8

Every run is a process as a user starts it; the two sides take turns, so that whatever else the machine does meets both.
Prints accuracy on eval.dataset by samples and seconds by accuracy, and draws both (learn.svg). TRL (1.16) comes with
`pip install '.[peer]'`. rollout.batch_size is set so that a batch is one optimizer step.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import learn_peer
import task
from learn_curves import Learned, Point, Side, picture, race

from slurm_rlhf.config.check import check
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.text import dump_toml
from slurm_rlhf.errors import ConfigError, RunError
from slurm_rlhf.run_directory import RunDirectory

OURS = "slurm-rlhf"


def main(words: list[str] | None = None) -> int:
    """Train with both sides, a run of each for every seed, and show what they learned."""
    parser = task.parser(__doc__, seeds=3, steps=120, every=10, out="runs/learn")
    parser.add_argument("--no-peer", action="store_true", help="our side alone")
    options, rest = parser.parse_known_args(words)
    return task.printed(lambda: measure(options, *task.layers(rest)), show, options.json)


def measure(options: argparse.Namespace, files: list[str], keys: list[str]) -> dict[str, Any]:
    """Train with the configuration of some files and keys. Raises ConfigError, RunError."""
    config = load_config(files or None, keys)
    directory = Path(options.out).absolute()
    if not options.no_peer and importlib.util.find_spec("trl") is None:
        raise ConfigError(
            "TRL, the other side, is not installed in this environment: "
            "pip install '.[peer]', or --no-peer for our side alone"
        )
    prepare(config, options.steps, options.every)
    task.make_new(directory)
    ours, peers = [], []
    for seed in range(1, options.seeds + 1):
        ours.append(train(config, "ours", directory, seed))
        if not options.no_peer:
            peers.append(_peer(config, directory, seed, options.steps, options.every))
    sides = [Side(OURS, ours)]
    if peers:
        sides.append(Side(f"TRL {importlib.metadata.version('trl')}", peers))
    title = f"{config.algo.advantage.estimator}, {config.train.batch_size} responses per optimizer step"
    return drawn("learn", sides, f"accuracy on held-out problems: {title}", directory)


def drawn(bench: str, sides: Sequence[Side], title: str, directory: Path) -> dict[str, Any]:
    """Draw the curves of a bench into its directory, and return its result."""
    file = directory / f"{bench}.svg"
    file.write_text(picture(list(sides), title), encoding="utf-8")
    return {
        "bench": bench,
        "picture": str(file),
        "load": os.getloadavg()[0],
        "sides": [asdict(side) for side in sides],
    }


def show(result: dict[str, Any]) -> str:
    """Write the results for a reader."""
    ours, *peers = map(side_of, result["sides"])
    return f"{race(ours, peers[0] if peers else None)}\npicture: {result['picture']}"


def side_of(found: dict[str, Any]) -> Side:
    """Read a side of the JSON object."""
    runs = [Learned(**{**each, "points": [Point(**point) for point in each["points"]]}) for each in found["runs"]]
    return Side(found["name"], runs)


def prepare(config: Config, steps: int, every: int) -> None:
    """Make both sides do the same: one optimizer step per batch, evaluations, an end of the schedule at zero.

    Raises ConfigError for what the bench lacks, and what `check` raises.
    """
    if not config.eval.dataset or not config.reward.remote_url:
        raise ConfigError(
            "learn needs eval.dataset and reward.remote_url, as in: python tests/lab/learn.py "
            "sbatch/recipes/grpo.toml sbatch/quickstart.toml --rollout.n_samples_per_prompt=8"
        )
    group = config.rollout.n_samples_per_prompt
    if group < 2 or config.train.batch_size % group:
        raise ConfigError(
            f"TRL's GRPO needs groups: rollout.n_samples_per_prompt = {group} must be at least 2 and "
            f"divide train.batch_size = {config.train.batch_size}"
        )
    config.rollout.batch_size = config.train.batch_size // group
    config.train.max_epochs, config.actor.lr_min_ratio = 1, 0.0
    as_compared(config, steps, every)


def as_compared(config: Config, steps: int, every: int) -> None:
    """Set what all runs of a comparison have in common. Raises ConfigError, as `check` does."""
    config.train.max_steps, config.eval.steps = steps, every
    config.resume = "never"
    config.logger.progress, config.logger.tensorboard = "plain", False
    check(config)


def train(config: Config, name: str, directory: Path, seed: int) -> Learned:
    """Run to the end, or as far as it goes, and read the curve. Raises RunError where it fails without one."""
    mine = deepcopy(config)
    place = RunDirectory(directory / f"{name}_{seed}")
    mine.train.seed, mine.run_dir = seed, str(place.root)
    file, log = (directory / f"{name}_{seed}.{end}" for end in ("toml", "log"))
    file.write_text(dump_toml(mine), encoding="utf-8")
    first: list[float] = []

    def read(line: str) -> None:
        if not first and re.match(r"\s+1/\d+ ", line):
            first.append(time.monotonic())

    began = time.monotonic()
    try:
        task.run_process([*task.TRAIN, str(file)], log, read)
    except RunError:
        summary = _summary(place) if place.summary.exists() else {}
        if "error" not in summary or summary.get("eval_after") is None:
            raise
        print(f"{place.root.name} ended early, and counts as far as it went: {summary['error']}")
    rows = [json.loads(line) for line in place.metrics.read_text(encoding="utf-8").splitlines()]
    points, seconds = [Point(0, 0.0, _summary(place)["eval_before"])], 0.0
    for row in rows:
        seconds += row["time/step"] - row.get("time/eval", 0.0)
        if "eval" in row:
            samples = row["step"] * mine.rollout.batch_size * mine.rollout.n_samples_per_prompt
            points.append(Point(samples, seconds, row["eval"]))
    print(f"{name}, seed {seed}: {points[0].accuracy:.3f} before, {points[-1].accuracy:.3f} after")
    return Learned(seed, points, first[0] - began - rows[0]["time/step"])


def _summary(place: RunDirectory) -> dict[str, Any]:
    return dict(json.loads(place.summary.read_text(encoding="utf-8")))


def _peer(config: Config, directory: Path, seed: int, steps: int, every: int) -> Learned:
    output, spec, file = (directory / f"peer_{seed}.{end}" for end in ("jsonl", "json", "toml"))
    file.write_text(dump_toml(config), encoding="utf-8")
    threads = len(os.sched_getaffinity(0))
    learn_peer.PeerRun(str(file), str(output), seed, steps, every, threads, time.monotonic()).write(spec)
    task.run_process([sys.executable, learn_peer.__file__, str(spec)], directory / f"peer_{seed}.log")
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    points = [Point(row["step"] * config.train.batch_size, row["seconds"], row["eval"]) for row in rows]
    return Learned(seed, points, rows[0]["start_up_s"])


if __name__ == "__main__":
    sys.exit(main())
