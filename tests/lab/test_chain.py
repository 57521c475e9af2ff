"""A whole pipeline on the quickstart's task: what a reward model changes, and what a student learns of its teacher.

sft of a careless pupil, a reward model of preferences, and PPO against it. Preferred is the sum that is rounded to
tens, over an exact one: which of two sums is right a model of this size does not learn from pairs (0.53 to 0.64 of
held-out ones). The share of a model's answers to held-out problems that are multiples of ten says what it made of it.
A teacher is the pupil after exact sums; it is distilled into the pupil by sbatch/recipes/distill.toml. The share of
right answers says how near the student comes.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import task

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "sbatch" / "quickstart.toml"
SFT = ROOT / "sbatch" / "quickstart_sft.toml"
DISTILL_RECIPE = ROOT / "sbatch" / "recipes" / "distill.toml"
STAGES: dict[str, tuple[str, list[str], dict[str, str]]] = {
    "sft": ("sft", [str(SFT), "input.toml"], {}),
    "rm": ("rm", [str(SFT), "rm.toml"], {"actor.model_name_or_path": "{sft}"}),
    "ppo": (
        "train",
        [str(QUICKSTART), "input.toml", "ppo.toml"],
        {"actor.model_name_or_path": "{sft}", "reward.model_name_or_path": "{rm}"},
    ),
    "pupil_rounded": ("eval", [str(QUICKSTART), "input.toml", "rounded.toml"], {"model": "{sft}"}),
    "ppo_rounded": ("eval", [str(QUICKSTART), "input.toml", "rounded.toml"], {"model": "{ppo}"}),
    "teacher": ("sft", [str(SFT), "teacher.toml"], {"actor.model_name_or_path": "{sft}"}),
    "student": (
        "train",
        [str(DISTILL_RECIPE), str(QUICKSTART), "input.toml", "distill.toml"],
        {"actor.model_name_or_path": "{sft}", "algo.distill.model_name_or_path": "{teacher}"},
    ),
    "pupil_right": ("eval", [str(QUICKSTART), "input.toml"], {"model": "{sft}"}),
    "teacher_right": ("eval", [str(QUICKSTART), "input.toml"], {"model": "{teacher}"}),
    "student_right": ("eval", [str(QUICKSTART), "input.toml"], {"model": "{student}"}),
}
"""Stage -> (command, files, keys)."""
PAIRS = 12_000
RM = """
[rm]
dataset = "pairs.jsonl"
eval_dataset = "held_out.jsonl"
learning_rate = 1e-3
batch_size = 64
max_epochs = 1
max_steps = 0
"""
PPO = """
[train]
max_steps = 40
[reward]
remote_url = ""
normalize_enable = true
[eval]
dataset = ""
"""
INPUT = """
[actor]
model_name_or_path = "{given}/untrained"
[sft]
dataset = "{given}/sft.jsonl"
[data]
prompt_dataset = "{given}/train.jsonl"
[eval]
dataset = "{given}/eval.jsonl"
"""
JUDGE = """
[reward]
remote_url = "rounded.py"
"""
ROUNDED = '''"""The share of answers that are multiples of ten."""


def reward_func(responses, **kwargs):
    return [float(response.endswith("0")) for response in responses]
'''
TEACHER = """
[sft]
dataset = "{given}/train.jsonl"
learning_rate = 1e-3
max_epochs = 3
max_steps = 0
[data]
output_key = "label"
"""
DISTILL = """
[train]
max_steps = 400
[reward]
remote_url = ""
[eval]
dataset = ""
"""


def write_files(given: Path, out: Path) -> None:
    """Write the pipeline and its preferences, of problems of `given`."""
    rng = random.Random(1)
    for name, source, count in (("pairs", "train", PAIRS), ("held_out", "eval", None)):
        problems = [json.loads(line) for line in (given / f"{source}.jsonl").read_text().splitlines()[:count]]
        pairs = [(row["input"], *rounded(int(row["label"]), rng)) for row in problems]
        rows = [dict(zip(("input", "chosen", "rejected"), pair, strict=True)) for pair in pairs]
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"input": INPUT, "rm": RM, "ppo": PPO, "rounded": JUDGE, "teacher": TEACHER, "distill": DISTILL}
    for name, text in files.items():
        (out / f"{name}.toml").write_text(text.replace("{given}", str(given)))
    (out / "rounded.py").write_text(ROUNDED)
    stages = ['run_dir = "."\n']
    for name, (command, files, keys) in STAGES.items():
        words = ", ".join(f'{key} = "{value}"' for key, value in keys.items())
        stages.append(f'[[stage]]\nname = "{name}"\ncommand = "{command}"\nfiles = {json.dumps(files)}\n')
        stages.append(f"keys = {{ {words} }}\n")
    (out / "chain.toml").write_text("".join(stages))


def rounded(total: int, rng: random.Random) -> tuple[str, str]:
    """Return the sum rounded to tens, and one near it that is not."""
    near = total if total % 10 else total + rng.randrange(1, 10)
    return str(round(total, -1)), str(near)


@pytest.mark.full  # each of its commands has a shorter test
@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(3600)
def test_ppo_learns_what_a_reward_model_prefers_and_a_student_what_its_teacher_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    given, out = tmp_path / "input", tmp_path / "chain"
    given.mkdir()
    out.mkdir()
    subprocess.run([sys.executable, str(ROOT / "sbatch" / "quickstart_data.py"), str(given)], check=True)
    write_files(given, out)
    task.run_process(
        [sys.executable, "-m", "slurm_rlhf.cli", "pipeline", str(out / "chain.toml"), "--local"], out / "log"
    )
    rows = [json.loads(line) for line in (out / "rm" / "model.run" / "metrics.jsonl").read_text().splitlines()]
    shares = {
        name: json.loads((out / name / "eval.json").read_text())["eval"]
        for name, (command, *_) in STAGES.items()
        if command == "eval"
    }
    print(rows[-1], shares)
    assert rows[-1]["eval/accuracy"] > 0.95
    assert shares["pupil_rounded"] < 0.2
    assert shares["ppo_rounded"] > 0.9
    assert shares["pupil_right"] < 0.7
    assert shares["teacher_right"] > 0.99
    assert shares["student_right"] > shares["teacher_right"] - 0.02
