"""Packed sequences of given lengths, and edits of a model directory."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from slurm_rlhf.records import Experience


def make_experience(lens: list[tuple[int, int]]) -> Experience:
    rng = np.random.default_rng(0)
    prompts, responses = (np.array(column, dtype=np.int32) for column in zip(*lens, strict=True))
    tokens = rng.integers(2, 69, int((prompts + responses).sum())).astype(np.int32)
    actions = int(responses.sum())
    return Experience(prompts, responses, tokens, np.ones(actions, np.bool_), np.zeros(len(lens), np.float32))


def edit_config(path: Path, **changes: object) -> Path:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return path
