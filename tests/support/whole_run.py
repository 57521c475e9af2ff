"""An undisturbed run of all roles on this machine: the one that others are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from training_runs import finished, workspace

# Running statistics of the rewards are one more thing that a resumed run must have kept.
NORMALIZED = "--reward.normalize_enable=true"
# Two data sets, sampled while the actor trains.
EVALUATED = (
    *("--eval.steps=1", "--eval.overlap=true", "--eval.temperature=1", "--eval.n_samples_per_prompt=4"),
    "--ckpt.best_metric=eval/sampled/mean",
)
# A term of the loss in addition to the policy's, with a column of weights of its own.
NLL = "--actor.nll_coef=0.1"
SAME = (NORMALIZED, NLL, *EVALUATED)
WORLD = ("--actor.num_gpus_per_node=2", "--vllm.num_engines=2", "--ckpt.save_steps=2", *SAME)
SMALL = ("--algo.kl.init_coef=0", "--train.max_steps=2", NORMALIZED, NLL)
STEPS = 4


@dataclass(frozen=True, slots=True)
class Whole:
    config: Path
    run_dir: Path
    output: str  # printed by the run

    @property
    def stated(self) -> tuple[Path, str]:
        return self.run_dir, self.output


_made: dict[int, Whole] = {}
_small: dict[int, Path] = {}


def whole_run(factory: pytest.TempPathFactory) -> Whole:
    """A run of two actor ranks, a critic, a reference and two engines; made once for all modules of a session."""
    if id(factory) not in _made:
        file = workspace(factory.mktemp("runs"))
        greedy = '{ path = "eval.jsonl", name = "greedy", temperature = 0, n_samples_per_prompt = 1 }'
        sets = f'datasets = [{greedy}, {{ path = "eval.jsonl", name = "sampled", source_key = "label" }}]'
        file.write_text(file.read_text().replace('dataset = "eval.jsonl"', sets))
        run_dir = file.parent / "whole"
        output = finished(file, run_dir, *WORLD)
        _made[id(factory)] = Whole(file, run_dir, output)
    return _made[id(factory)]


def small_run(factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of an actor's rank, a critic and an engine, on the same files; made once as well."""
    if id(factory) not in _small:
        file = whole_run(factory).config
        run_dir = file.parent / "small"
        finished(file, run_dir, *SMALL)
        _small[id(factory)] = run_dir
    return _small[id(factory)]
