"""Stages as jobs of a real slurmctld: by sbatch and by submitit, with a signal, a requeue, and the same numbers."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import CHECKOUT, COMMAND, Cluster
from stage_runs import make_sums, timeless_metrics

from slurm_rlhf.config.load import load_config
from slurm_rlhf.nodes.submitit_job import SIGNAL, submit

pytestmark = pytest.mark.slow

STEPS = 400
WAYS = (
    ("sft", 2, 3, "sbatch"),
    ("rm", 2, 3, "sbatch"),
    ("dpo", 2, 2, "sbatch"),
    ("sft", 1, 0, "sbatch"),
    ("rm", 2, 3, "submitit"),
    ("dpo", 1, 0, "submitit"),
)
"""Stage, nodes with a rank on each, ZeRO stage, what submits the job."""


@pytest.fixture(scope="module")
def work(slurm: Cluster) -> Path:
    """A directory with a model, sums, and pairs of a right and a wrong one."""
    directory = slurm.shared / "of_stages"
    make_sums(directory)
    sums = [json.loads(line) for line in (directory / "sums.jsonl").read_text().splitlines()]
    pairs = [{"input": row["input"], "chosen": row["output"], "rejected": "0" + row["output"]} for row in sums]
    (directory / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return directory


def keys(work: Path, stage: str, name: str, nodes: int, zero: int, steps: int) -> list[str]:
    given = {
        "actor.model_name_or_path": work / "model",
        "actor.num_nodes": nodes,
        "actor.num_gpus_per_node": 1,
        "actor.lr_warmup_ratio": 0.03,  # as in sft.toml, which submitit does not read
        f"{stage}.dataset": work / ("sums.jsonl" if stage == "sft" else "pairs.jsonl"),
        f"{stage}.eval_dataset": "",
        f"{stage}.output_dir": work / name,
        f"{stage}.batch_size": 8,
        f"{stage}.learning_rate": 1e-3,
        f"{stage}.max_steps": steps,
        f"{stage}.max_epochs": steps,
        f"{stage}.save_steps": 0,
        "data.max_len": 32,
        "data.apply_chat_template": "false",
        "ds.param_dtype": "fp32",
        "ds.zero_stage": zero,
        "train.gradient_checkpointing": "off",
        "train.threads_per_rank": 1,
    }
    return [f"--{key}={value}" for key, value in given.items()]


def by_sbatch(slurm: Cluster, work: Path, stage: str, name: str, nodes: int, zero: int, *more: str) -> int:
    options = (f"--nodes={nodes}", "--cpus-per-task=4", "--mem=8000", "--gres=none", f"--output={work / name}.log")
    words = [f"--export=ALL,STAGE={stage}", "--no-requeue" if name.startswith("whole") else "--requeue"]
    words += ["sbatch/sft.sh", *keys(work, stage, name, nodes, zero, STEPS), *more]
    return slurm.sbatch(*options, *words, cwd=CHECKOUT)


@pytest.fixture
def submitted(slurm: Cluster, work: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Submit a stage by the Python call, from this process as one on the login node; the submitit job."""
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, slurm.environment[name])

    def submit_stage(stage: str, name: str, nodes: int, zero: int, steps: int = STEPS) -> Any:
        asked = [f"--slurm.nodes={nodes}", "--slurm.time=10", "--slurm.signal_lead_s=60", "--slurm.mem=8000"]
        config = load_config(None, [*keys(work, stage, name, nodes, zero, steps), *asked, "--slurm.partition=gpu"])
        return submit(config, command=stage)

    return submit_stage


def test_submitit_runs_a_stage_on_two_nodes(slurm: Cluster, work: Path, submitted: Callable[..., Any]) -> None:
    job = submitted("sft", "small", 2, 0, steps=10)
    assert slurm.wait_over(int(job.job_id)) == ("COMPLETED", 0), Path(job.paths.stdout).read_text()
    assert job.result() == {"status": "finished", "steps": 10, "total_steps": 10, "world": {"actor": 2}, "seed": 42}
    assert len(timeless_metrics(work / "small.run")) == 10
    logs = {path.name for path in (work / "small.run" / "logs").glob("actor.*.log")}
    assert {"actor.gpu001.0.log", "actor.gpu002.1.log"} <= logs
    shown = slurm.run(COMMAND, "status", str(work / "small.run"))
    assert re.search(r"small\.run: finished\nstep +10/10\n", shown), shown


@pytest.mark.full  # test_slurm_requeue, test_slurm_jobs and the tests above go the same ways one by one
@pytest.mark.parametrize(("stage", "nodes", "zero", "way"), WAYS)
def test_a_stage_saves_requeues_itself_and_goes_on_with_the_same_numbers(
    slurm: Cluster, work: Path, submitted: Callable[..., Any], stage: str, nodes: int, zero: int, way: str
) -> None:
    name = f"{stage}_{nodes}_{way}"
    if way == "sbatch":
        job, log, number = by_sbatch(slurm, work, stage, name, nodes, zero), work / f"{name}.log", signal.SIGUSR1
    else:
        asked = submitted(stage, name, nodes, zero)
        job, log, number = int(asked.job_id), Path(asked.paths.stdout), SIGNAL
    slurm.wait_until(lambda: len(timeless_metrics(work / f"{name}.run")) >= 5, "step 5")
    slurm.run("scancel", "--batch", f"--signal={number.name}", str(job))
    slurm.wait_until(lambda: slurm.job(job)["Restarts"] == "1", "requeue")
    slurm.start_soon(job)
    assert slurm.wait_over(job) == ("COMPLETED", 0), log.read_text()
    said = log.read_text()
    stopped = re.search(rf"saved at step (\d+)/{STEPS}", said)
    assert stopped, said
    assert 5 <= int(stopped[1]) < STEPS
    assert f"resuming from {work}/{name}.run/checkpoints/step_{int(stopped[1]):06d}" in said
    found = timeless_metrics(work / f"{name}.run")
    rows = [json.loads(row) for row in found]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[-1]["loss"] < 0.5 * rows[0]["loss"]
    assert len({path.name.split(".")[1] for path in (work / f"{name}.run" / "logs").glob("actor.*.*.log")}) >= nodes
    assert slurm.left(work / f"{name}.run", *slurm.names) == []
    if way == "submitit":
        assert asked.result()["status"] == "finished"
    whole = f"whole_{stage}_{nodes}"
    if not (work / f"{whole}.run").exists():  # another way may have made it
        assert slurm.wait_over(by_sbatch(slurm, work, stage, whole, nodes, zero)) == ("COMPLETED", 0)
    assert timeless_metrics(work / f"{whole}.run") == found


@pytest.mark.full  # test_slurm_conductor_node and test_run_failures have nodes that die under PPO
@pytest.mark.parametrize("first", [False, True])
def test_a_stage_whose_node_dies_goes_on_on_another_one(slurm: Cluster, work: Path, first: bool) -> None:
    """Whether the node that is gone has the batch script or a rank alone, the numbers are those of a run in peace."""
    name = f"died_{first}"
    job = by_sbatch(slurm, work, "sft", name, 2, 3, "--sft.save_steps=20")
    slurm.wait_until(lambda: len(timeless_metrics(work / f"{name}.run")) >= 25, "step 25")
    host = slurm.job(job)["BatchHost"]
    lost = host if first else next(node for node in slurm.names[:2] if node != host)
    with slurm.patience(20):
        slurm.cluster("crash", lost)
        try:
            slurm.wait_until(lambda: slurm.job(job)["Restarts"] == "1", "requeue")
            slurm.wait_until(lambda: slurm.job(job)["JobState"] == "PENDING", "end of the first start")
            slurm.start_soon(job)
            assert slurm.wait_over(job) == ("COMPLETED", 0), (work / f"{name}.log").read_text()
            assert lost not in slurm.job(job)["NodeList"]
        finally:
            slurm.restart(lost)
    found = timeless_metrics(work / f"{name}.run")
    assert [json.loads(row)["step"] for row in found] == list(range(1, STEPS + 1))
    if not (work / "whole_sft_2.run").exists():
        assert slurm.wait_over(by_sbatch(slurm, work, "sft", "whole_sft_2", 2, 3)) == ("COMPLETED", 0)
    assert timeless_metrics(work / "whole_sft_2.run") == found
    assert slurm.left(work / f"{name}.run", *slurm.names) == []
