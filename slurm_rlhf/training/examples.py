"""Supervised examples: a JSONL file of prompts and answers as packed experience."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slurm_rlhf.config.schema import Data
from slurm_rlhf.data.framing import continuations
from slurm_rlhf.data.jsonl import read_jsonl
from slurm_rlhf.data.prompts import PromptSet
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.errors import DataError
from slurm_rlhf.records import Experience


@dataclass(slots=True)
class Examples:
    experience: Experience  # the answers, each with the end-of-sequence token, are the responses
    dropped: int  # longer than data.max_len


def load_examples(path: Path, tokenizer: Tokenizer, data: Data) -> Examples:
    """Rows with `data.input_key` and `data.output_key`; prompts are written and tokenized as PPO's prompts are.

    Raises DataError with file and line for a row that is not an example, and when none is left.
    """
    answers = [_answer(row, f"{path}:{line}", data) for line, row in read_jsonl(path, data.max_samples)]
    prompts = PromptSet.load(path, tokenizer, data, data.max_len - 1, data.max_samples)
    texts = [answers[prompt.index] for prompt in prompts]
    continued = continuations(list(prompts), texts, tokenizer, data.apply_chat_template)
    responses = [[*ids, tokenizer.eos_token_id] for ids in continued]
    kept = [
        (prompt.token_ids, np.asarray(response, dtype=np.int32))
        for prompt, response in zip(prompts, responses, strict=True)
        if len(prompt.token_ids) + len(response) <= data.max_len
    ]
    if not kept:
        raise DataError(f"{path}: every example is longer than data.max_len = {data.max_len} tokens: raise it")
    experience = Experience(
        np.array([len(prompt) for prompt, _ in kept], dtype=np.int32),
        np.array([len(response) for _, response in kept], dtype=np.int32),
        np.concatenate([part for pair in kept for part in pair]),
        np.ones(sum(len(response) for _, response in kept), dtype=np.bool_),
        np.zeros(len(kept), dtype=np.float32),
    )
    return Examples(experience, len(answers) - len(kept))


def _answer(row: dict[str, Any], where: str, data: Data) -> str:
    if data.output_key not in row:
        columns = ", ".join(row) or "none"
        raise DataError(
            f"{where}: no column {data.output_key!r} (columns: {columns}): fix the row or set data.output_key"
        )
    value = row[data.output_key]
    if not isinstance(value, str):
        raise DataError(f"{where}: {data.output_key!r} must be a string, got {type(value).__name__}")
    return value
