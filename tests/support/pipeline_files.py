"""Pipelines of two and of four stages with a tiny model, and their inputs."""

from __future__ import annotations

import json
from pathlib import Path

from sums_task import toml
from tiny_models import make_tiny
from training_runs import CONFIG, workspace

FILE = """
run_dir = "out"
sbatch = ["--partition=gpu"]
setup = ["module load cuda"]

[[stage]]
name = "sft"
command = "sft"
files = ["base.toml"]
sbatch = ["--nodes=2"]

[[stage]]
name = "better"
command = "dpo"
files = ["base.toml"]
keys = { actor.model_name_or_path = "{sft}", dpo.beta = 0.2 }
"""
BASE = """
[actor]
model_name_or_path = "model"
[data]
max_len = 16
[ds]
param_dtype = "fp32"
[train]
threads_per_rank = 1
[sft]
dataset = "sums.jsonl"
batch_size = 10
max_steps = 2
[dpo]
dataset = "pairs.jsonl"
batch_size = 10
max_steps = 2
"""


def made(root: Path) -> Path:
    """A pipeline of two stages, and its inputs."""
    make_tiny(root / "model")
    sums = [{"input": f"{a}+{b}=", "output": str(a + b)} for a in range(5) for b in range(5)]
    pairs = [{"input": row["input"], "chosen": row["output"], "rejected": "0" + row["output"]} for row in sums]
    for name, rows in (("sums", sums), ("pairs", pairs)):
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "base.toml").write_text(BASE)
    (root / "stages.toml").write_text(FILE)
    return root / "stages.toml"


CHAIN = """
[[stage]]
name = "sft"
command = "sft"
files = ["base.toml"]

[[stage]]
name = "rm"
command = "rm"
files = ["base.toml"]
keys = { actor.model_name_or_path = "{sft}" }

[[stage]]
name = "ppo"
command = "train"
files = ["run.toml"]
keys.actor = { model_name_or_path = "{sft}" }
keys.reward = { model_name_or_path = "{rm}", remote_url = "" }
keys.eval = { dataset = "" }

[[stage]]
name = "judged"
command = "eval"
files = ["run.toml"]
keys = { model = "{ppo}" }
"""
CHAIN_BASE = {
    "actor.model_name_or_path": "model",
    "data.max_len": 16,
    "data.output_key": "label",
    "ds.param_dtype": "fp32",
    "sft.dataset": "prompts.jsonl",
    "rm.dataset": "pairs.jsonl",
    **{f"{name}.{key}": value for name in ("sft", "rm") for key, value in (("batch_size", 20), ("max_steps", 2))},
}
RUN = {**CONFIG, "algo.advantage.estimator": "group_norm", "algo.kl.init_coef": 0.0, "train.max_steps": 1}

CHAIN_DONE = [["sft", "sft", "done:"], ["rm", "rm", "done:"], ["ppo", "train", "done:"], ["judged", "eval", "done:"]]
"""The first words of what `status` says of it at its end, a stage each."""


def chain(root: Path) -> Path:
    """A pipeline of sft, rm, PPO's kin against that reward model and an evaluation, and its inputs."""
    workspace(root)
    rows = [json.loads(line) for line in (root / "prompts.jsonl").read_text().splitlines()]
    pairs = [{"input": row["input"], "chosen": row["label"], "rejected": row["label"] + "0"} for row in rows]
    (root / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (root / "base.toml").write_text(toml(CHAIN_BASE))
    (root / "run.toml").write_text(toml(RUN))
    (root / "chain.toml").write_text(CHAIN)
    return root / "chain.toml"
