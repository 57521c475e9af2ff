"""`slurm-rlhf sft`, `rm` and `dpo` next to TRL's trainers: the same model, examples and order; losses and tokens/s.

    python tests/lab/stage_race.py

Every run is a process as a user starts it; the two sides take turns, and each seed has examples of its own, with
log-normal lengths. The steps between the first and the last are timed; for dpo the first, too, and with it the
log-probs of the reference, which TRL computes in each step. Prints for each stage the rates, the losses, and how far
they are apart. TRL (1.16) comes with `pip install '.[peer]'`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import stage_peer
import task
from stage_task import Lengths, config_of, need_trl, rows, tokens, write

sys.path.append(str(Path(__file__).parents[1] / "support"))

from tiny_models import make_reward, make_tiny

from slurm_rlhf.config.check import check_stage
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.schema_jobs import STAGES
from slurm_rlhf.config.text import dump_toml
from slurm_rlhf.errors import RunError
from slurm_rlhf.nodes.environment import WAITING_THREADS

DEFAULTS: dict[str, int | str] = {
    "seeds": 3,
    "steps": 16,
    "batch": 16,
    "median": 48,  # median length of an answer in tokens
    "sigma_percent": 100,  # standard deviation of the logarithm of the length
    "longest": 448,
    "hidden": 128,  # width of the model, a multiple of 64
    "layers": 4,
    "threads": 1,
    "out": "runs/stages",
}
"""Option -> its usual value."""
RATES = {"sft": 1e-3, "rm": 3e-4, "dpo": 1e-4}
"""Stage -> learning rate."""


@dataclass(frozen=True, slots=True)
class Trained:
    """Holds one run."""

    losses: list[float]  # one for each step
    tokens: int  # tokens in all steps that are timed
    seconds: float
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class Pair:
    """Holds the runs of both sides with one seed."""

    ours: Trained
    peer: Trained

    @property
    def apart(self) -> float:
        """Return the largest difference of the losses of a step."""
        return max(abs(mine - its) for mine, its in zip(self.ours.losses, self.peer.losses, strict=True))

    def ratio(self, of: Callable[[Trained], float]) -> float:
        """Return how many times the tokens of TRL's ours trains in a second of `of`."""
        return (self.ours.tokens / of(self.ours)) / (self.peer.tokens / of(self.peer))


class Watch:
    """Reads seconds and CPU seconds of the one child at two lines of its output."""

    def __init__(self, first: str, last: str) -> None:
        """`first`, `last`: patterns of the lines."""
        self._patterns = [first, last]
        self.seen: list[tuple[float, float]] = []

    def __call__(self, line: str) -> None:
        if len(self.seen) < len(self._patterns) and re.match(self._patterns[len(self.seen)], line):
            times = [child.cpu_times() for child in psutil.Process().children()]
            self.seen.append((time.monotonic(), sum(each.user + each.system for each in times)))

    def elapsed(self) -> tuple[float, float]:
        """Return both between the lines. Raises RunError where a line has not come."""
        if len(self.seen) < len(self._patterns):
            raise RunError(f"the run printed no line like {self._patterns[len(self.seen)]!r}")
        (start, start_cpu), (end, end_cpu) = self.seen
        return end - start, end_cpu - start_cpu


def main(words: list[str] | None = None) -> int:
    """Train all stages with both sides, and show the rates and the losses."""
    parser = task.parser(__doc__, **DEFAULTS)
    parser.add_argument("--stages", default=",".join(STAGES), help=f"some of them, as in rm,dpo [{','.join(STAGES)}]")
    options = parser.parse_args(words)
    if unknown := set(options.stages.split(",")) - set(STAGES):
        parser.error(f"--stages: no stage {', '.join(sorted(unknown))}; there are {', '.join(STAGES)}")
    return task.printed(lambda: measure(options), show, options.json)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train. Raises ConfigError, RunError."""
    need_trl()
    directory = Path(options.out).absolute()
    task.make_new(directory)
    sizes = {"hidden": options.hidden, "layers": options.layers, "heads": options.hidden // 64, "kv_heads": 1}
    model, scores = make_tiny(directory / "model", **sizes), make_reward(directory / "scores", **sizes)
    found: dict[str, list[dict[str, Any]]] = {}
    for stage in options.stages.split(","):
        for seed in range(1, options.seeds + 1):
            run = Run(stage, directory / f"{stage}_{seed}", scores if stage == "rm" else model, seed, options)
            sides = [run.ours, run.peer] if seed % 2 else [run.peer, run.ours]
            done = {side.__name__: side() for side in sides}
            found.setdefault(stage, []).append(asdict(Pair(**done)))
    return {
        "bench": "stage_race",
        "peer": f"TRL {importlib.metadata.version('trl')}",
        "stages": found,
        "load": os.getloadavg()[0],
    }


class Run:
    """Trains one stage with one seed on both sides."""

    def __init__(self, stage: str, directory: Path, model: Path, seed: int, options: argparse.Namespace) -> None:
        """Write the examples and the configuration into the new directory. Raises ConfigError."""
        directory.mkdir()
        self._stage, self._directory, self._options = stage, directory, options
        lengths = Lengths(options.median, options.sigma_percent / 100, options.longest)
        examples = rows(stage, options.batch * options.steps, lengths, seed)
        self._tokens = list(map(tokens, examples))
        keys = {
            **{"batch_size": options.batch, "learning_rate": RATES[stage], "train.seed": seed},
            "train.threads_per_rank": options.threads,
        }
        file = write(directory / "rows.jsonl", examples)
        self._config: Config = config_of(stage, model, file, directory / "out", keys)
        check_stage(self._config, stage)
        (directory / "stage.toml").write_text(dump_toml(self._config), encoding="utf-8")

    def ours(self) -> Trained:
        """Train with the command. Raises RunError."""
        name = re.escape(self._stage)
        begins = rf"{name}: computing the reference" if self._stage == "dpo" else rf"{name}: step 1/"
        watch = self._train([sys.executable, "-m", "slurm_rlhf.cli", self._stage], "stage.toml", f"{name}: ", begins)
        lines = (self._directory / "out.run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return self._trained([json.loads(line)["loss"] for line in lines], watch)

    def peer(self) -> Trained:
        """Train with TRL. Raises RunError, also where it has read other tokens than ours reads."""
        losses = self._directory / "peer.jsonl"
        spec = {"config": str(self._directory / "stage.toml"), "stage": self._stage, "losses": str(losses)}
        (self._directory / "peer.json").write_text(json.dumps({**spec, "threads": self._options.threads}))
        begins = "begin" if self._stage == "dpo" else "step 1/"
        watch = self._train([sys.executable, stage_peer.__file__], "peer.json", "", begins)
        lines = [json.loads(line) for line in losses.read_text(encoding="utf-8").splitlines()]
        if lines[-1]["tokens"] != sum(self._tokens):
            raise RunError(f"TRL has read {lines[-1]['tokens']} tokens of {sum(self._tokens)}")
        return self._trained([line["loss"] for line in lines], watch)

    def _train(self, command: list[str], file: str, prefix: str, begins: str) -> Watch:
        watch = Watch(begins, rf"{prefix}step {self._options.steps - 1}/")
        words = [f"{name}={value}" for name, value in WAITING_THREADS.items()]
        task.run_process(["env", *words, *command, str(self._directory / file)], self._directory / f"{file}.log", watch)
        return watch

    def _trained(self, losses: Sequence[float], watch: Watch) -> Trained:
        batch, steps = self._options.batch, self._options.steps
        timed = self._tokens[0 if self._stage == "dpo" else batch : batch * (steps - 1)]
        return Trained(list(losses), sum(timed), *watch.elapsed())


def show(result: dict[str, Any]) -> str:
    """Write the rates and the losses for a reader."""
    lines = [
        f"{'':6}{'tokens/s':>10}{result['peer']:>12}{'ratio':>8}{'by CPU time':>13}"
        f"{'first loss':>12}{'last':>9}{result['peer']:>12}{'apart':>9}{'seeds apart':>13}"
    ]
    for stage, found in result["stages"].items():
        pairs = [Pair(Trained(**one["ours"]), Trained(**one["peer"])) for one in found]
        for seed, pair in enumerate(pairs, start=1):
            lines.append(f"{stage:6}{_row([pair])}  seed {seed}")
        lines.append(f"{stage:6}{_row(pairs)}{seeds_apart(pairs):13.1e}")
    return "\n".join([*lines, f"load {result['load']:.1f}; without a seed: medians, and the largest differences"])


def seeds_apart(pairs: Sequence[Pair]) -> float:
    """Return the largest difference of our losses of a step between two seeds; 0 of one seed."""
    return max(max(step) - min(step) for step in zip(*(pair.ours.losses for pair in pairs), strict=True))


def _row(pairs: Sequence[Pair]) -> str:
    def median(of: Callable[[Pair], float]) -> float:
        return statistics.median(map(of, pairs))

    return (
        f"{median(lambda pair: pair.ours.tokens / pair.ours.seconds):10.0f}"
        f"{median(lambda pair: pair.peer.tokens / pair.peer.seconds):12.0f}"
        f"{median(lambda pair: pair.ratio(lambda run: run.seconds)):8.2f}"
        f"{median(lambda pair: pair.ratio(lambda run: run.cpu_seconds)):13.2f}"
        f"{median(lambda pair: pair.ours.losses[0]):12.4f}{median(lambda pair: pair.ours.losses[-1]):9.4f}"
        f"{median(lambda pair: pair.peer.losses[-1]):12.4f}{max(pair.apart for pair in pairs):9.1e}"
    )


if __name__ == "__main__":
    sys.exit(main())
