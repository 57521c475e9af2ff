"""`sbatch sbatch/generate.sh` under a real slurmctld: a job array loses an engine, is requeued, and is merged."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from generation_runs import COMMAND, assert_whole, generation_workspace, lines_of, written
from slurm_cluster import CHECKOUT, OVER, Cluster
from training_runs import is_worker, summary

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(600)]

ROWS = 240
START_S = 200  # until the first lines of several engines on a busy machine


@pytest.fixture(scope="module")
def config(slurm: Cluster) -> Path:
    return generation_workspace(slurm.shared / "generation", ROWS)


def submit(slurm: Cluster, config: Path, run_dir: Path, options: list[str], *overrides: str) -> int:
    """Submit the batch file as it is, with the tests' model and rows."""
    work = config.parent
    words = [
        *("--ntasks-per-node=1", "--cpus-per-task=4", "--mem=8000", f"--output={run_dir}.%a.log", *options),
        *("sbatch/generate.sh", f"--run_dir={run_dir}", f"--generate.model_name_or_path={work / 'model'}"),
        *(f"--generate.dataset={work / 'rows.jsonl'}", f"--reward.remote_url={work / 'reward.py'}"),
        *("--data.apply_chat_template=false", "--data.max_len=64", "--rollout.n_samples_per_prompt=2"),
        *(
            "--rollout.max_new_tokens=24",
            "--vllm.dtype=fp32",
            "--vllm.max_num_seqs=4",
            "--train.threads_per_rank=1",
            "--generate.engines_per_node=2",
        ),
        *overrides,
    ]
    return slurm.sbatch(*words, cwd=CHECKOUT)


def shown(slurm: Cluster, job: str) -> dict[str, str]:
    return dict(re.findall(r"([\w/]+)=(\S*)", slurm.run("scontrol", "show", "job", job)))


def wait_for_lines(slurm: Cluster, file: Path, count: int) -> None:
    slurm.wait_until(lambda: written(file) >= count, f"line {count} of {file}", START_S)


def requeue(slurm: Cluster, job: str, restarts: int) -> None:
    slurm.run("scontrol", "requeue", job)
    slurm.wait_until(lambda: shown(slurm, job)["Restarts"] == str(restarts), f"restart {restarts}", 60)
    slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now+3")


def kill_a_rank(slurm: Cluster, run_dir: Path, node: str) -> None:
    """Kill one process of an engine on `node`."""
    words = ("--role=rollout", f"--run_dir={run_dir}")
    pids = [pid for pid, line in slurm.numbered(node) if all(word in line for word in words) and is_worker(line)]
    os.kill(pids[-1], signal.SIGKILL)


def wait_completed(slurm: Cluster, job: str, log: Path) -> None:
    slurm.wait_until(lambda: shown(slurm, job)["JobState"] in OVER, f"the end of job {job}", 300)
    said = log.read_text()
    assert shown(slurm, job)["JobState"] == "COMPLETED", said
    assert "Traceback" not in said


def test_tasks_of_an_array_lose_an_engine_and_a_requeue_and_merge_to_every_row(slurm: Cluster, config: Path) -> None:
    """Two tasks of one node with two engines each: one loses an engine, the other is requeued while it writes."""
    run_dir = slurm.shared / "array"
    job = submit(slurm, config, run_dir, ["--array=0-1", "--nodes=1", "--gres=gpu:2"])
    shards = [run_dir / "shard_00000", run_dir / "shard_00001"]
    wait_for_lines(slurm, shards[0] / "output.jsonl", 12)
    kill_a_rank(slurm, shards[0], shown(slurm, f"{job}_0")["NodeList"])
    wait_for_lines(slurm, shards[1] / "output.jsonl", 12)
    requeue(slurm, f"{job}_1", 1)
    wait_completed(slurm, f"{job}_0", Path(f"{run_dir}.0.log"))
    wait_completed(slurm, f"{job}_1", Path(f"{run_dir}.1.log"))
    assert sorted(bool(engine["lost"]) for engine in summary(shards[0])["engines"]) == [False, True]
    assert "are there from before" in Path(f"{run_dir}.1.log").read_text()
    assert {line["row"] % 2 for line in lines_of(shards[1] / "output.jsonl")} == {1}
    subprocess.run([*COMMAND, "merge", str(run_dir)], check=True, timeout=60)
    assert_whole(run_dir / "merged.jsonl", ROWS)
    ordered = [(line["row"], line["sample"]) for line in lines_of(run_dir / "merged.jsonl")]
    assert ordered == sorted(ordered)
    assert not any(slurm.left(run_dir, node) for node in slurm.names)
