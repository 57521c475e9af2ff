"""A pipeline of two stages with a tiny model, and its inputs."""

from __future__ import annotations

import json
from pathlib import Path

from tiny_models import make_tiny

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
