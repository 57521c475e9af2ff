"""A whole pipeline on the quickstart's task: what a reward model changes, and what a student learns of its teacher.

    bash sbatch/quickstart.sh --train.max_steps=1            # once: it makes runs/quickstart_input
    python tests/lab/stage_chain.py --out=runs/chain

sft of a careless pupil, a reward model of preferences, and PPO against it. Preferred is the sum that is rounded to
tens, over an exact one: which of two sums is right a model of this size does not learn from pairs (0.53 to 0.64 of
held-out ones). The share of a model's answers to held-out problems that are multiples of ten says what it made of it.
A teacher is the pupil after exact sums; it is distilled into the pupil by sbatch/recipes/distill.toml. The share of
right answers says how near the student comes.
Started again, it goes on.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

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
max_steps = 150
[reward]
remote_url = ""
[eval]
dataset = ""
"""


def main(words: list[str] | None = None) -> int:
    """Write the files, run the pipeline, and show what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", default="runs/quickstart_input", help="what quickstart.sh has made")
    parser.add_argument("--out", default="runs/chain", help="directory of the pipeline")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(words)
    return task.printed(
        lambda: measure(Path(options.input).absolute(), Path(options.out).absolute()), show, options.json
    )


def measure(given: Path, out: Path) -> dict[str, Any]:
    """Run the pipeline. Raises RunError."""
    out.mkdir(parents=True, exist_ok=True)
    write_files(given, out)
    task.run_process(
        [sys.executable, "-m", "slurm_rlhf.cli", "pipeline", str(out / "chain.toml"), "--local"], out / "log"
    )
    return found(out)


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


def found(out: Path) -> dict[str, Any]:
    """Return what `eval` has found of each model, the figures of rm, and how far the student was from its teacher."""
    rows = [json.loads(line) for line in (out / "rm" / "model.run" / "metrics.jsonl").read_text().splitlines()]
    steps = [json.loads(line) for line in (out / "student" / "metrics.jsonl").read_text().splitlines()]
    return {
        "shares": {
            name: json.loads((out / name / "eval.json").read_text())["eval"]
            for name, (command, *_) in STAGES.items()
            if command == "eval"
        },
        "rm": {name: value for name, value in rows[-1].items() if name.startswith("eval/")},
        "teacher_gap": [row["teacher_gap"] for row in steps],
    }


def show(result: dict[str, Any]) -> str:
    """Write the results for a reader."""
    said = {"rounded": "are multiples of ten", "right": "are right"}
    lines = [
        f"{model:<8} {value:.3f} of its answers to held-out problems {said[what]}"
        for (model, what), value in ((name.split("_"), value) for name, value in result["shares"].items())
    ]
    lines.append(f"the reward model prefers the rounded one of {result['rm']['eval/accuracy']:.3f} of held-out pairs")
    gaps = result["teacher_gap"]
    lines.append(f"log-prob of the teacher less that of the student: {gaps[0]:.2f} at first, {gaps[-1]:.2f} at last")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
