"""Words of the undisturbed runs on this machine that others are compared with: runs/conftest.py does them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

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
