"""Predicted and measured seconds of a step on CPUs, by phase: ten layouts, of the quickstart's model and a larger one.

    python tests/lab/step_times.py runs/quickstart_input

The directory is what the quickstart has made (sbatch/quickstart.sh). Each layout is a run of a few steps, and the table
has what it printed at its end. Other work on the machine makes the seconds longer.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import task

from slurm_rlhf.bench.compare import ModelSize, write_qwen2

SBATCH = Path(__file__).parents[2] / "sbatch"
PHASES = ("sampling", "forward", "update", "sync")
LARGER = ModelSize(hidden=512, layers=8, positions=64)
"""Sizes of a Qwen2 of 30 million parameters."""

GRPO = ("--algo.advantage.estimator=group_norm", "--algo.kl.init_coef=0")
LAYOUTS: dict[str, tuple[str, ...]] = {
    "ppo": (),
    "ppo, 2 engines": ("--vllm.num_engines=2",),
    "ppo, 2 actors": ("--actor.num_gpus_per_node=2",),
    "ppo, small batches": ("--rollout.batch_size=32", "--train.batch_size=64"),
    "grpo": GRPO,
}
"""Name -> keys that differ from the quickstart's. Each is run with both models."""
OF_LARGER = ("--rollout.batch_size=16", "--rollout.n_samples_per_prompt=2", "--train.batch_size=16")


def main(words: list[str] | None = None) -> int:
    """Run all layouts, and show the table."""
    parser = task.parser(__doc__, steps=6)
    parser.add_argument("input", type=Path, help="the directory of the quickstart's data and model")
    options = parser.parse_args(words)
    return task.printed(lambda: measure(options.input.absolute(), options.steps), show, options.json)


def measure(source: Path, steps: int) -> dict[str, Any]:
    """Run all layouts with both models. Raises RunError if a run fails."""
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="slurm-rlhf-times-") as scratch:
        models = {"1 M": source / "model", "30 M": larger(Path(scratch, "model"), source / "model")}
        for model, path in models.items():
            more = OF_LARGER if path != source / "model" else ()
            for name, keys in LAYOUTS.items():
                words = [f"--data.prompt_dataset={source / 'train.jsonl'}", f"--actor.model_name_or_path={path}"]
                words += [f"--train.max_steps={steps}", "--eval.dataset=", *more, *keys]
                run_dir = Path(scratch, f"{model} {name}".replace(" ", "_").replace(",", ""))
                config = str(SBATCH / "quickstart.toml")
                task.run_process([*task.TRAIN, config, *words, f"--run_dir={run_dir}"], run_dir.with_suffix(".log"))
                rows[f"{model}, {name}"] = json.loads((run_dir / "summary.json").read_text())["phases"]
    return {"layouts": rows, "off": off(rows), "load": os.getloadavg()[0]}


def larger(path: Path, like: Path) -> Path:
    """Write a model of random weights with the tokenizer of `like`."""
    from transformers import AutoTokenizer

    write_qwen2(path, AutoTokenizer.from_pretrained(like), LARGER, lambda model: None)
    return path


def off(rows: dict[str, Any]) -> dict[str, float]:
    """Return by how much predictions are off, as a share of what was measured: medians over the layouts, by phase."""
    pairs = {phase: [row[phase] for row in rows.values()] for phase in PHASES}
    return {
        phase: statistics.median(abs(one["predicted"] / one["measured"] - 1) for one in found)
        for phase, found in pairs.items()
    }


def show(result: dict[str, Any]) -> str:
    """Write the table for a reader."""
    lines = [f"{'predicted / measured, s':28}" + "".join(f"{phase:>18}" for phase in PHASES)]
    for name, row in result["layouts"].items():
        cells = (f"{row[phase]['predicted']:.3f} / {row[phase]['measured']:.3f}" for phase in PHASES)
        lines.append(f"{name:28}" + "".join(f"{cell:>18}" for cell in cells))
    middle = "".join(f"{100 * result['off'][phase]:16.0f} %" for phase in PHASES)
    return "\n".join([*lines, f"{'off, median':28}{middle}", f"load {result['load']:.1f}"])


if __name__ == "__main__":
    sys.exit(main())
