"""The GSM8K example: its reward by hand, its data from files as the hub has them, and that it fits one GPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from model_configs import SHAPES
from waiting import HANG_S

from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.roles import ROLES, running_roles
from slurm_rlhf.config.rules import rule_problems
from slurm_rlhf.placement.memory import account
from slurm_rlhf.placement.model_shape import shape_of
from slurm_rlhf.placement.rank_memory import GIB

SBATCH = Path(__file__).resolve().parents[2] / "sbatch"
SMALL = {**SHAPES["7B"], "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
         "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936}  # fmt: skip
"""Of Qwen2.5-0.5B's config.json."""


def reward_function() -> Any:
    spec = importlib.util.spec_from_file_location("gsm8k_reward", SBATCH / "gsm8k_reward.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.reward_func


@pytest.mark.parametrize(
    ("response", "label", "reason", "right"),
    [
        ("4 + 5 = 9.\n#### 9", "9", "stop", 1.0),
        ("The answer is $1,234.50.", "1234.5", "stop", 1.0),
        ("#### -3", "-3", "stop", 1.0),
        ("9 apples, then 4 more", "9", "stop", 0.0),
        ("#### 9", "9", "length", 0.0),
        ("none", "9", "stop", 0.0),
        ("", "9", "stop", 0.0),
        ("#### 9 and nothing else", "9", "stop", 1.0),
    ],
)
def test_the_reward(response: str, label: str, reason: str, right: float) -> None:
    answer = reward_function()([response], [label], [reason])
    assert answer["rewards"] == answer["scores"] == [right]


def test_the_data_of_the_hub_becomes_prompts(tmp_path: Path) -> None:
    (tmp_path / "main").mkdir()
    for part, count in (("train", 3), ("test", 2)):
        rows = [{"question": f" {n} and 1? ", "answer": f"It is {n + 1}.\n#### {n + 1}"} for n in range(count)]
        (tmp_path / "main" / f"{part}-0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, str(SBATCH / "gsm8k_data.py"), str(tmp_path)]
    for _ in range(2):  # again over what it has written
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=HANG_S)
    assert f"{tmp_path}/train.jsonl: 3 prompts" in done.stdout
    first, *_ = [json.loads(line) for line in (tmp_path / "eval.jsonl").read_text().splitlines()]
    assert first == {"input": "0 and 1? Think step by step, and end with the answer behind ####.", "label": "1"}


def test_without_data_it_says_what_to_download(tmp_path: Path) -> None:
    command = [sys.executable, str(SBATCH / "gsm8k_data.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANG_S)
    assert done.returncode == 1
    assert "download openai/gsm8k into it" in done.stderr


def test_it_fits_one_gpu_of_24_gb() -> None:
    config = load_config(SBATCH / "gsm8k.toml")
    assert list(rule_problems(config)) == []
    assert [role.ranks(config) for role in running_roles(config)] == [1, 1]
    found = account(config, dict.fromkeys(ROLES, shape_of(SMALL)), int(23.5 * GIB))
    assert max(row.needed for row in found.rows) < 23.5 * GIB
