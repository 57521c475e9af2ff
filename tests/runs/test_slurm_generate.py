"""`sbatch sbatch/generate.sh` under a real slurmctld: engines die, nodes drain, jobs are requeued, no row is lost."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from generation_runs import BAD, COMMAND, SAMPLES, assert_whole, generation_workspace, lines_of, written
from slurm_cluster import CHECKOUT, Cluster
from training_runs import is_worker, summary
from waiting import HANG_S

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.full]

ROWS = 240


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


def wait_for_lines(slurm: Cluster, file: Path, count: int) -> None:
    slurm.wait_until(lambda: written(file) >= count, f"line {count} of {file}")


def requeue(slurm: Cluster, job: str, restarts: int, *changes: str) -> None:
    slurm.run("scontrol", "requeue", job)
    slurm.wait_until(lambda: slurm.job(job)["Restarts"] == str(restarts), f"restart {restarts}")
    slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now+3", *changes)


def kill_a_rank(slurm: Cluster, run_dir: Path, node: str) -> int:
    """Kill one process of an engine on `node`; which rank it was."""
    words = ("--role=rollout", f"--run_dir={run_dir}")
    found = [item for item in slurm.numbered(node) if all(word in item[1] for word in words) and is_worker(item[1])]
    pid, line = found[-1]
    local = re.search(rb"\0LOCAL_RANK=(\d+)\0", Path(f"/proc/{pid}/environ").read_bytes())
    first = re.search(r"--first_rank=(\d+)", line)
    assert local
    assert first
    os.kill(pid, signal.SIGKILL)
    return int(first[1]) + int(local[1])


def wait_completed(slurm: Cluster, job: str, log: Path) -> None:
    assert slurm.wait_over(job) == ("COMPLETED", 0), log.read_text()
    assert "Traceback" not in log.read_text()


def test_tasks_of_an_array_lose_an_engine_and_a_requeue_and_merge_to_every_row(slurm: Cluster, config: Path) -> None:
    """Two tasks of one node with two engines each: one loses an engine, the other is requeued while it writes."""
    run_dir = slurm.shared / "array"
    job = submit(slurm, config, run_dir, ["--array=0-1", "--nodes=1", "--gres=gpu:2"])
    shards = [run_dir / "shard_00000", run_dir / "shard_00001"]
    wait_for_lines(slurm, shards[0] / "output.jsonl", 12)
    kill_a_rank(slurm, shards[0], slurm.job(f"{job}_0")["NodeList"])
    wait_for_lines(slurm, shards[1] / "output.jsonl", 12)
    requeue(slurm, f"{job}_1", 1)
    wait_completed(slurm, f"{job}_0", Path(f"{run_dir}.0.log"))
    wait_completed(slurm, f"{job}_1", Path(f"{run_dir}.1.log"))
    assert sorted(bool(engine["lost"]) for engine in summary(shards[0])["engines"]) == [False, True]
    assert "are there from before" in Path(f"{run_dir}.1.log").read_text()
    assert {line["row"] % 2 for line in lines_of(shards[1] / "output.jsonl")} == {1}
    subprocess.run([*COMMAND, "merge", str(run_dir)], check=True, timeout=HANG_S)
    assert_whole(run_dir / "merged.jsonl", ROWS)
    ordered = [(line["row"], line["sample"]) for line in lines_of(run_dir / "merged.jsonl")]
    assert ordered == sorted(ordered)
    assert not any(slurm.left(run_dir, node) for node in slurm.names)


def test_a_job_moves_from_node_to_node_with_engines_of_two_ranks(slurm: Cluster, config: Path) -> None:
    """A job of two nodes, with two engines of TP 2 on each, is requeued twice while it writes.

    One rank is killed. Then the node from which the job is led is drained: the job goes on there, and its next start,
    cut down to one node, is on the other. The start after that has a third node in place of the drained one.
    """
    run_dir = slurm.shared / "moved"
    output, log = run_dir / "output.jsonl", Path(f"{run_dir}.log")
    options = ["--nodes=2", "--gres=gpu:4", f"--output={log}"]
    slow = ("--vllm.tensor_parallel_size=2", "--vllm.max_num_seqs=2")
    with slurm.drained("gpu003", "gpu004"):
        job = str(submit(slurm, config, run_dir, options, *slow))
        slurm.wait_until(lambda: len({line["engine"] for line in lines_of(output)}) == 4, "answers of all engines")
        killed = kill_a_rank(slurm, run_dir, "gpu002")
        slurm.wait_until(lambda: " engines are left" in log.read_text(), "loss of an engine")
        [(engine, why)] = re.findall(r"engine (\d) on gpu002 is lost: (.*)", log.read_text())
        assert int(engine) == killed // 2
        assert re.search(rf"rank {killed} .*(died|was killed by SIGKILL)", why)
        assert "3 of 4 engines are left" in log.read_text()

        slurm.drain("gpu001")
        before = written(output)
        wait_for_lines(slurm, output, before + 16)
        assert slurm.job(job)["JobState"] == "RUNNING"
        assert int(engine) not in {line["engine"] for line in lines_of(output)[before:]}
        first = requeued_on(slurm, job, output, 1, ["gpu002"])

        slurm.undrain("gpu003")
        wait_for_lines(slurm, output, first.count(b"\n") + 16)
        second = requeued_on(slurm, job, output, 2, ["gpu002", "gpu003"])
        wait_completed(slurm, job, log)
    assert output.read_bytes().startswith(second)
    assert second.startswith(first)
    assert_whole(output, ROWS)
    assert_sane(lines_of(output))
    assert log.read_text().count("are there from before") == 2
    engines = summary(run_dir)["engines"]
    assert [(engine["node"], engine["gpus"], engine["lost"]) for engine in engines] == [
        (node, gpus, "") for node in ("gpu002", "gpu003") for gpus in ([0, 1], [2, 3])
    ]
    assert {engine["engine"] for engine in engines if engine["responses"]} >= {2, 3}  # engines of the third node
    assert not any(slurm.left(run_dir, node) for node in slurm.names)


def requeued_on(slurm: Cluster, job: str, output: Path, restarts: int, nodes: list[str]) -> bytes:
    """Requeue a job for as many nodes, and wait until it runs on these; the whole lines that it had written before."""
    size = len(nodes)
    requeue(slurm, job, restarts, f"NumNodes={size}", f"NumTasks={size}", f"NumCPUs={4 * size}")
    kept = output.read_bytes()
    slurm.wait_until(lambda: slurm.job(job)["JobState"] == "RUNNING", f"start {restarts + 1}")
    assert slurm.run("scontrol", "show", "hostnames", slurm.job(job)["NodeList"]).split() == nodes
    return kept[: kept.rfind(b"\n") + 1]


def assert_sane(found: list[dict[str, Any]]) -> None:
    """Bad rows have errors; each other response ended by itself, or had all the tokens it may have."""
    assert sorted({line["row"] for line in found if "error" in line}) == sorted(BAD)
    good = [line for line in found if "error" not in line]
    assert all(line["finish_reason"] in ("stop", "length") for line in good)
    assert all(line["tokens"] == 24 for line in good if line["finish_reason"] == "length")
    assert all(0 < line["tokens"] <= 24 and line["score"] == len(line["response"]) for line in good)
    assert len({line["seed"] for line in good}) == len(good) == (ROWS - len(BAD)) * SAMPLES
