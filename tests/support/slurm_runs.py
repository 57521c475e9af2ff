"""Whole runs as jobs of the Slurm in slurm_nodes.py, and what they have left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slurm_nodes import CHECKOUT, SlurmNodes
from training_runs import metrics

COMMAND = str(CHECKOUT / ".venv" / "bin" / "slurm-rlhf")
PLACES = ("--actor.num_nodes=2", "--vllm.num_engines=2", "--vllm.num_nodes=2", "--train.threads_per_rank=1")
"""Actor with two ranks on two nodes, critic, reference, two engines on different nodes."""
SMALL = ("--vllm.num_engines=1", "--vllm.num_nodes=1", "--algo.kl.init_coef=0", "--eval.dataset=")
"""Fewer processes to start, where it is not they that matter."""
ENDLESS = ("--train.max_steps=100000", "--train.num_episodes=100000")


def submit(slurm: SlurmNodes, config: Path, run_dir: Path, options: list[str], *overrides: str) -> int:
    """A job that execs the conductor, as the sbatch files do."""
    script = run_dir.with_suffix(".sh")
    script.write_text(f'#!/bin/bash\nexec {COMMAND} train {config} --run_dir={run_dir} "$@"\n')
    words = ["--ntasks-per-node=1", "--open-mode=append", f"--output={run_dir}.log", *options]
    return slurm.sbatch(*words, str(script), *PLACES, *overrides)


def steps(run_dir: Path) -> int:
    return len(metrics(run_dir))


def saved(run_dir: Path) -> list[int]:
    """Steps of the checkpoints that are complete."""
    names = [path.name.removeprefix("step_") for path in (run_dir / "checkpoints").glob("step_*")]
    return sorted(int(name) for name in names if name.isdigit())


def said(run_dir: Path) -> str:
    """What the job printed."""
    return Path(f"{run_dir}.log").read_text()


def summary(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return found


def left(slurm: SlurmNodes, run_dir: Path, *nodes: str) -> list[str]:
    """Command lines of the run's processes on `nodes`."""
    return [line for node in nodes for line in slurm.processes(node) if str(run_dir) in line]


def start_soon(slurm: SlurmNodes, job: int) -> None:
    """Spare a requeued job the rest of Slurm's pause before it starts again (`cred_expire`).

    Not all of it: in the second in which its last credential was revoked a node refuses the next one.
    """
    slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now+3")
