"""`slurm-rlhf generate` for the tests: a tiny model, sums with bad rows among them, and what must come out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_models import make_tiny
from training_runs import COMMAND as TRAIN

COMMAND = [*TRAIN[:-1], "generate"]
SAMPLES = 2
BAD = {7: "{torn", 23: '{"nothing": 1}', 41: json.dumps({"input": ""}), 59: json.dumps({"input": "1" * 60})}
"""Number of a row -> its line."""

REWARD = """
import time
from pathlib import Path

PACE = Path(__file__).with_name("pace")


def reward_func(queries, prompts, labels, **kwargs):
    if PACE.exists():
        time.sleep(0.2)
    return [float(len(response)) for response in kwargs["responses"]]
"""

CONFIG = """
[generate]
model_name_or_path = "model"
dataset = "rows.jsonl"
[data]
max_len = 64
[rollout]
n_samples_per_prompt = 2
max_new_tokens = 24
top_p = 0.9
[vllm]
max_num_seqs = 8
dtype = "fp32"
[reward]
remote_url = "reward.py"
[train]
threads_per_rank = 1
"""


def generation_workspace(path: Path, rows: int) -> Path:
    """A directory with model, `rows` rows and reward function; returns the configuration file."""
    path.mkdir(parents=True, exist_ok=True)
    make_tiny(path / "model", hidden=128, heads=4, kv_heads=2)
    lines = [BAD.get(row, json.dumps({"input": f"{row}+{row % 7}="})) for row in range(rows)]
    (path / "rows.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (path / "reward.py").write_text(REWARD)
    (path / "generate.toml").write_text(CONFIG)
    return path / "generate.toml"


def lines_of(file: Path) -> list[dict[str, Any]]:
    """The whole lines of an output."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_bytes().decode().split("\n")[:-1]]


def written(file: Path) -> int:
    """Count the whole lines of an output."""
    return file.read_bytes().count(b"\n") if file.exists() else 0


def assert_whole(file: Path, rows: int) -> None:
    """Every sample of every row is there once."""
    found = [(line["row"], line["sample"]) for line in lines_of(file)]
    assert len(found) == rows * SAMPLES
    assert sorted(found) == [(row, sample) for row in range(rows) for sample in range(SAMPLES)]


def answers(file: Path) -> dict[tuple[int, int], Any]:
    """Read an output, without the fields that depend on who answered."""
    kept = ("response", "finish_reason", "tokens", "seed", "score", "error")
    return {(line["row"], line["sample"]): [line.get(key) for key in kept] for line in lines_of(file)}
