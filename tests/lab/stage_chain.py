"""A whole pipeline on the quickstart's task, and what each of its models makes of held-out preferences.

    bash sbatch/quickstart.sh --train.max_steps=1            # once: it makes runs/quickstart_input
    python tests/lab/stage_chain.py --out=runs/chain

sft of a careless pupil, a reward model of preferences, PPO against it, and a student, as the pupil was, into which the
model of PPO is distilled. Preferred is the sum that is rounded to tens, over an exact one: which of two sums is right a
model of this size does not learn from pairs (0.53 to 0.64 of held-out ones). `eval` says which share of a model's
answers to held-out problems is a multiple of ten.
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
STAGES: dict[str, tuple[str, list[str], dict[str, str]]] = {
    "sft": ("sft", [str(SFT)], {}),
    "pupil": ("eval", [str(QUICKSTART), "judge.toml"], {"model": "{sft}"}),
    "rm": ("rm", [str(SFT), "rm.toml"], {"actor.model_name_or_path": "{sft}"}),
    "ppo": (
        "train",
        [str(QUICKSTART), "ppo.toml"],
        {"actor.model_name_or_path": "{sft}", "reward.model_name_or_path": "{rm}"},
    ),
    "teacher": ("eval", [str(QUICKSTART), "judge.toml"], {"model": "{ppo}"}),
    "distilled": (
        "train",
        [str(QUICKSTART), "distill.toml"],
        {"actor.model_name_or_path": "{sft}", "algo.distill.model_name_or_path": "{ppo}"},
    ),
    "student": ("eval", [str(QUICKSTART), "judge.toml"], {"model": "{distilled}"}),
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
JUDGE = """
[reward]
remote_url = "rounded.py"
"""
ROUNDED = '''"""The share of answers that are multiples of ten."""


def reward_func(responses, **kwargs):
    return [float(response.endswith("0")) for response in responses]
'''
DISTILL = """
[reward]
remote_url = ""
[eval]
dataset = ""
[algo.advantage]
estimator = "group_norm"
[algo.kl]
init_coef = 0.0
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
    for name, text in (("rm", RM), ("ppo", PPO), ("distill", DISTILL), ("judge", JUDGE)):
        (out / f"{name}.toml").write_text(text)
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
    """Return the share of rounded answers of each model that `eval` has judged, and the figures of rm."""
    rows = [json.loads(line) for line in (out / "rm" / "model.run" / "metrics.jsonl").read_text().splitlines()]
    return {
        "rounded": {
            name: json.loads((out / name / "eval.json").read_text())["eval"]
            for name, (command, *_) in STAGES.items()
            if command == "eval"
        },
        "rm": {name: value for name, value in rows[-1].items() if name.startswith("eval/")},
    }


def show(result: dict[str, Any]) -> str:
    """Write the results for a reader."""
    lines = [
        f"{name:<8} {value:.3f} of its answers to held-out problems are multiples of ten"
        for name, value in result["rounded"].items()
    ]
    lines.append(f"the reward model prefers the rounded one of {result['rm']['eval/accuracy']:.3f} of held-out pairs")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
