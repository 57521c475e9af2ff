"""`sbatch sbatch/sft.sh` under a real slurmctld: ranks on two nodes, a signal, a requeue, and the same numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from slurm_cluster import CHECKOUT, Cluster
from tiny_models import make_tiny

pytestmark = [pytest.mark.slow, pytest.mark.full]

STEPS = 400


def metrics(run_dir: Path) -> list[dict[str, float]]:
    file = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "perf/"))} for row in rows]


def submit(slurm: Cluster, work: Path, name: str, *words: str) -> int:
    keys = {
        "actor.model_name_or_path": work / "model",
        "sft.dataset": work / "sums.jsonl",
        "sft.output_dir": work / name,
        "sft.batch_size": 8,
        "sft.learning_rate": 1e-3,
        "sft.max_steps": STEPS,
        "sft.max_epochs": STEPS,
        "sft.save_steps": 0,
        "data.max_len": 32,
        "data.apply_chat_template": "false",
        "ds.param_dtype": "fp32",
        "ds.zero_stage": 3,
        "train.gradient_checkpointing": "off",
        "train.threads_per_rank": 1,
        "actor.num_gpus_per_node": 1,
    }
    given = [*(f"--{key}={value}" for key, value in keys.items()), *words]
    options = ("--nodes=2", "--cpus-per-task=4", "--mem=8000", "--gres=none", f"--output={work / name}.log")
    return slurm.sbatch(
        *options, "--no-requeue" if name == "whole" else "--requeue", "sbatch/sft.sh", *given, cwd=CHECKOUT
    )


def test_a_stage_on_two_nodes_saves_requeues_itself_and_goes_on_with_the_same_numbers(slurm: Cluster) -> None:
    work = slurm.shared / "stages"
    work.mkdir()
    make_tiny(work / "model")
    rows = [{"input": f"{a}+{b}=", "output": str(a + b)} for a in range(10) for b in range(10)]
    (work / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = submit(slurm, work, "cut")
    slurm.wait_until(lambda: len(metrics(work / "cut.run")) >= 5, "step 5")
    slurm.run("scancel", "--batch", "--signal=USR1", str(job))
    slurm.wait_until(lambda: slurm.job(job)["Restarts"] == "1", "requeue")
    slurm.start_soon(job)
    assert slurm.wait_over(job) == ("COMPLETED", 0)
    said = (work / "cut.log").read_text()
    stopped = re.search(rf"saved at step (\d+)/{STEPS}", said)
    assert stopped, said
    assert 5 <= int(stopped[1]) < STEPS
    assert f"resuming from {work}/cut.run/checkpoints/step_{int(stopped[1]):06d}" in said
    found = metrics(work / "cut.run")
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    assert found[-1]["loss"] < 0.5 * found[0]["loss"]
    assert {path.name.split(".")[1] for path in (work / "cut.run" / "logs").glob("actor.*.0.log")} != set()
    assert slurm.wait_over(submit(slurm, work, "whole")) == ("COMPLETED", 0)
    assert metrics(work / "whole.run") == found
    assert slurm.left(work / "cut.run", "gpu001", "gpu002") == []
