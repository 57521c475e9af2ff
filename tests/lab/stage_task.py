"""Examples of unlike lengths that a small model learns from, and the configuration of a stage that trains on them."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ConfigError

MAX_LEN = 512
"""Tokens of the longest sequence: the positions of the random models."""
Row = dict[str, Any]
"""An example with TRL's names of its columns."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Holds the log-normal lengths of answers, in characters, which are the tokens of the random models."""

    median: int
    sigma: float  # standard deviation of the logarithm
    longest: int

    def draw(self, random: np.random.Generator) -> int:
        """Draw the length of an answer."""
        return int(min(max(1, round(self.median * np.exp(self.sigma * random.standard_normal()))), self.longest))


def rows(kind: str, count: int, lengths: Lengths, seed: int) -> list[Row]:
    """Draw prompts that name a digit: the good answer repeats it, the bad one repeats another digit.

    `kind`: sft (completions), rm (pairs with margins), dpo (pairs) or kto (completions with labels).
    """
    random = np.random.default_rng(seed)
    found: list[Row] = []
    for place in range(count):
        digit, other = random.choice(10, 2, replace=False)
        prompt = {"prompt": "".join(random.choice(list("abcdefgh"), random.integers(1, 12))) + f"{digit}="}
        good, bad = (str(each) * lengths.draw(random) for each in (digit, other))
        if kind == "sft":
            found.append({**prompt, "completion": good})
        elif kind == "kto":
            found.append({**prompt, "completion": bad if place % 3 else good, "label": place % 3 == 0})
        else:
            margin = {"margin": float(random.integers(0, 3)) / 2} if kind == "rm" else {}
            found.append({**prompt, "chosen": good, "rejected": bad, **margin})
    return found


def tokens(row: Row) -> int:
    """Count the tokens of an example's sequences; each answer has one more, the end of the sequence."""
    answers = [row[name] for name in ("completion", "chosen", "rejected") if name in row]
    return sum(len(row["prompt"]) + len(answer) + 1 for answer in answers)


def write(file: Path, examples: list[Row]) -> Path:
    """Write the examples as JSONL."""
    file.write_text("".join(json.dumps(row) + "\n" for row in examples), encoding="utf-8")
    return file


def config_of(stage: str, model: Path, data: Path, output: Path, keys: Mapping[str, Any]) -> Config:
    """Make the configuration of a stage in fp32; `keys`: more of them, of the stage's group where they have no dot.

    The learning rate is constant, and the rows come in their order: this TRL can do, too. Raises ConfigError.
    """
    fixed = {
        **{"actor.model_name_or_path": model, "actor.lr_min_ratio": 1.0, "ds.param_dtype": "fp32"},
        **{"data.input_key": "prompt", "data.output_key": "completion", "data.max_len": MAX_LEN},
        **{"data.shuffle": "false", "dataset": data, "output_dir": output, "save_steps": 0},
    }
    named = {name if "." in name else f"{stage}.{name}": value for name, value in {**fixed, **keys}.items()}
    return load_config(None, [f"--{name}={value}" for name, value in named.items()])


def need_trl() -> None:
    """Raise ConfigError where TRL is not installed."""
    if importlib.util.find_spec("trl") is None:
        raise ConfigError("TRL, the other side, is not installed in this environment: pip install '.[peer]'")
