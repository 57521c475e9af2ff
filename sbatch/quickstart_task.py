"""Writes what the quickstart learns from with --task=NAME: a task of reasoning-gym, and a small untrained model.

    python sbatch/quickstart_task.py DIRECTORY NAME

sft.jsonl    demonstrations by a guessing pupil, who gives the answer to another question three times out of five
eval.jsonl   questions with another seed, with the library's own entries for its scorer
untrained/   the model of quickstart_data.py, for all characters and for the longest question
task.toml    keys of both runs: the questions of PPO are made by data.reasoning_gym
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from quickstart_data import SEED, write_model
from tokenizers import pre_tokenizers

from slurm_rlhf.config.schema import Data
from slurm_rlhf.errors import ConfigError
from slurm_rlhf.rewards.reasoning_gym import task_rows

QUESTIONS = {"eval": 256, "sft": 15_000}
GUESSES = 0.6
LONGEST = 200
"""Characters of question and answer together at most: a model this small learns nothing of longer ones in minutes."""
TOML = """\
run_dir = "../quickstart_{name}"
rollout.max_new_tokens = {answer}
rollout.batch_size = 64
train.batch_size = 128

[data]
reasoning_gym = "{name}"
prompt_dataset = ""
input_template = "{{}}\\n"
max_len = {whole}

[actor]
model_name_or_path = "model"

[reward]
remote_url = ""
preset = "reasoning_gym"

[eval]
dataset = "eval.jsonl"
"""
SFT_TOML = """\
[data]
input_template = "{{}}\\n"
max_len = {whole}

[actor]
model_name_or_path = "untrained"

[sft]
dataset = "sft.jsonl"
output_dir = "model"
batch_size = 64
"""


def main(directory: Path, name: str) -> None:
    """Write all files into a directory that is there; exit with a line for a task that is not known or too long."""
    try:
        evaluated = rows_of(name, 1, QUESTIONS["eval"])
        answer = max(size(row["label"]) for row in evaluated) + 1
        whole = max(size(row["input"]) for row in evaluated) + 1 + answer
        if whole > LONGEST:
            sys.exit(
                f"--task={name}: its questions and answers have up to {whole} characters, and {LONGEST} fit the "
                "quickstart's small model: take a task with short ones, as chain_sum, gcd or spell_backward; for "
                "others set data.reasoning_gym in a run with a model of yours"
            )
        shown = rows_of(name, 2, QUESTIONS["sft"])
    except ConfigError as error:
        sys.exit(f"--task={name}: {error}")
    rng = random.Random(SEED)
    shown = [row for row in shown if size(row["label"]) < answer and size(row["input"]) + 1 + answer <= whole]
    answers = [row["label"] for row in shown]
    said = [rng.choice(answers) if rng.random() < GUESSES else own for own in answers]
    pairs = dict.fromkeys(zip((row["input"] for row in shown), said, strict=True))  # some tasks ask twice
    demonstrations = [{"input": question, "output": text} for question, text in pairs]
    for part, rows in (("eval", evaluated), ("sft", demonstrations)):
        (directory / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for file, text in (("task.toml", TOML), ("sft.toml", SFT_TOML)):
        (directory / file).write_text(text.format(name=name, answer=answer, whole=whole), encoding="utf-8")
    write_model(directory / "untrained", sorted(pre_tokenizers.ByteLevel.alphabet()), whole)


def size(text: str) -> int:
    """Tokens of a text: each byte is one."""
    return len(text.encode())


def rows_of(name: str, seed: int, count: int) -> list[dict[str, Any]]:
    """Make questions; those of the run have the seed 0."""
    data = Data(reasoning_gym=name, reasoning_gym_seed=seed, max_samples=count)
    return [{**row, "label": str(row["label"])} for _, row in task_rows(data)]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
