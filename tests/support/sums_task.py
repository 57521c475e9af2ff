"""A task that a tiny model can learn: sums, their rewards, which `holds` can hold up, and the keys of a run on them."""

from __future__ import annotations

import json
from collections.abc import Mapping

PACE = "pace"
"""The hold with the seconds by which each reward takes longer."""
REWARD = '''"""A reward: 1 where the answer holds the label; files in `hold` make it fail."""

import sys
import time
from pathlib import Path

HOLD = Path(__file__).parent / "hold"


def reward_func(queries, prompts, labels, **kwargs):
    if (HOLD / "pace").exists():
        time.sleep(float((HOLD / "pace").read_text()))
    while (HOLD / "reward-hang").exists():
        time.sleep(0.02)
    if (HOLD / "reward-raise").exists():
        raise RuntimeError("the campaign's fault")
    if (HOLD / "reward-exit").exists():
        sys.exit(3)
    hits = [float(label in response) for label, response in zip(labels, kwargs["responses"])]
    return hits[:1] if (HOLD / "reward-few").exists() else {"rewards": hits, "scores": hits}
'''
"""A reward function, which tests of runs use, too."""
SPREAD = """
def reward_func(queries, prompts, labels, **kwargs):
    return [sum(map(ord, response)) % 7 / 7 for response in kwargs["responses"]]
"""
"""A reward by which the responses to a prompt nearly always differ: every step has a gradient."""
TINY = {
    "data.prompt_dataset": "prompts.jsonl",
    "data.max_len": 64,
    "actor.model_name_or_path": "model",
    "actor.learning_rate": 1e-3,
    "critic.learning_rate": 1e-3,
    "reward.remote_url": "reward.py",
    "rollout.max_new_tokens": 8,
    "train.full_determinism": True,
    "preflight": "quick",
    "ds.param_dtype": "fp32",
    "vllm.max_num_seqs": 16,
}
"""Keys of a run on the sums, which tests of runs have, too."""


def sums() -> list[str]:
    """Return the lines of a task that a tiny model can learn: 144 sums, and their last digits."""
    rows = [{"input": f"{a}+{b}=", "label": str((a + b) % 10)} for a in range(12) for b in range(12)]
    return [json.dumps(row) + "\n" for row in rows]


def toml(keys: Mapping[str, object]) -> str:
    """Write keys as a user's file has them, a line each."""
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
