"""Strangers at the ports of a run under a real slurmctld: on the nodes' own addresses, from its start to its end."""

from __future__ import annotations

import pytest
from intruders import record
from open_ports import Listening, Strangers, listening
from slurm_cluster import SMALL, Cluster, said
from training_runs import finished, metrics, timeless, workspace

from slurm_rlhf.wire.auth import RunKeys

# Behind -m full for its time: two whole runs.
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(700)]

STEPS = 8
LENGTH = (f"--train.max_steps={STEPS}", "--train.num_episodes=4", "--train.threads_per_rank=1")
NODES = ["--nodes=2", "--gres=gpu:8", "--cpus-per-task=4", "--mem=8000"]


def test_strangers_of_another_machine_change_no_metric_from_the_start_on(slurm: Cluster) -> None:
    """They come from the login node to every port of every process of both nodes, as soon as it listens."""
    config = workspace(slurm.shared / "ways")
    calm, run_dir = config.parent / "calm", slurm.shared / "visited"
    finished(config, calm, *SMALL, *LENGTH, "--actor.num_gpus_per_node=2")

    job = slurm.submit(config, run_dir, NODES, *SMALL, *LENGTH)
    words = f"--run_dir={run_dir}"
    slurm.wait_until(lambda: "--endpoint=" in "\n".join(slurm.left(run_dir, *slurm.names[:2])), "a rank")
    endpoint = "\n".join(slurm.left(run_dir, *slurm.names[:2])).partition("--endpoint=")[2].split()[0]
    recorded = record(endpoint, RunKeys.load(run_dir / ".control" / "keys.json"), "actor", 2)

    def ports() -> list[Listening]:
        """List the ports that another machine reaches. srun is Slurm's own."""
        ours = [
            pid
            for node in slurm.names[:2]
            for pid, line in slurm.numbered(node)
            if words in line and not line.startswith(("srun ", "/bin/bash"))
        ]
        return [each for each in listening(ours) if each.address != "127.0.0.1"]

    with Strangers(ports, recorded) as strangers:
        slurm.wait_until(lambda: bool(metrics(run_dir)) or over(slurm, job), "step 1")
        early = strangers.sent.total()
        state = slurm.wait_over(job)
    log = next((run_dir / "logs").glob("conductor.*.log")).read_text()
    assert state == ("COMPLETED", 0), said(run_dir)
    assert {each.address for each in strangers.met} == {slurm.address(node) for node in slurm.names[:2]}
    assert early > 100
    assert any("slurm_rlhf.ranks.torchrun" in each.command for each in strangers.met)
    assert counted(log)["connections refused"] > 10
    assert timeless(metrics(run_dir)) == timeless(metrics(calm))


def over(slurm: Cluster, job: int) -> bool:
    return slurm.job(job)["JobState"] not in ("PENDING", "RUNNING", "CONFIGURING")


def counted(log: str) -> dict[str, int]:
    """Read the counts that the conductor wrote about its control port when it closed it."""
    (line,) = [line for line in log.splitlines() if "control port:" in line]
    words = line.partition("control port: ")[2].split(", ")
    return {name: int(number) for number, _, name in (word.partition(" ") for word in words)}
