"""Runs that Slurm ends in every way it has, and the campaign of a cluster's faults."""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from campaign.cluster import FEWEST_STEPS, STEPS_EACH, OnSlurm
from campaign.cluster_faults import SPARES, layout
from campaign.draw import draw
from campaign.faults import EACH, SLURM
from campaign.leader import Leader
from campaign.result import carried_out
from campaign.verdicts import RECOVERED
from holds import Holds
from slurm_cluster import CHECKOUT, Cluster, said
from slurm_undisturbed import STEPS, Calm, calm_run
from training_runs import metrics, saved, steps, summary, timeless
from waiting import scaled

from slurm_rlhf.config.load import load_config
from slurm_rlhf.report.page import RunFiles, content
from slurm_rlhf.run_directory import RunDirectory

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NODES = ["--nodes=3", "--gres=gpu:8", "--cpus-per-task=4", "--mem=8000"]
CARRIED = ("JobName", "Partition", "TimeLimit", "CPUs/Task", "MinMemoryNode", "TresPerNode", "StdOut")


@pytest.fixture(scope="module")
def calm(slurm: Cluster) -> Calm:
    return calm_run(slurm)


def test_the_unedited_ppo_32b_trains_a_tiny_model_on_four_nodes(slurm: Cluster, calm: Calm) -> None:
    """Submit the batch file as it is, with nothing but overrides on its command line.

    Each role has a step on its own nodes, and a log per node and rank; who holds ports stops nothing; the interface is
    logged; the files `save` and `stop` are obeyed (in `calm_run`); no process is left.
    """
    assert f"srun --jobid={calm.job} --overlap --pty" in said(calm.run_dir)
    logs = calm.run_dir / "logs"
    assert {path.name for path in logs.iterdir()} >= {
        *("conductor.gpu001.0.log", "actor.gpu001.0.log", "actor.gpu002.1.log", "critic.gpu001.0.log"),
        *("reference.gpu002.0.log", "rollout.gpu003.0.log", "rollout.gpu004.1.log"),
    }
    ranks = json.loads((calm.run_dir / "rank_map.json").read_text())
    assert [(share["node"], share["gpus"]) for share in ranks["roles"]["actor"]] == [("gpu001", [0]), ("gpu002", [0])]
    (meeting,) = re.findall(r"meet at \S+:(\d+)\n", (logs / "actor.gpu001.torchrun.log").read_text())
    assert int(meeting) not in calm.held
    assert "NCCL_SOCKET_IFNAME=eth0" in (logs / "actor.gpu002.torchrun.log").read_text()
    assert not any(slurm.processes(node) for node in slurm.names)


def wait_for_another_step(slurm: Cluster, run_dir: Path) -> None:
    done = steps(run_dir)
    slurm.wait_until(lambda: steps(run_dir) > done, f"step {done + 1}")


def wait_for_restart(slurm: Cluster, job: int, run_dir: Path, restart: int) -> None:
    """Everything is saved, and nothing runs any more."""
    slurm.wait_until(lambda: slurm.job(job)["Restarts"] == str(restart), f"restart {restart}")
    assert summary(run_dir)["status"] == "stopped"
    assert saved(run_dir)[-1] == summary(run_dir)["steps"]
    # Before Slurm's KillWait is over, which is longer than any wait here.
    slurm.wait_until(lambda: not any(slurm.left(run_dir, node) for node in slurm.names), "end of its processes")


@pytest.mark.parametrize("preempted", [False, pytest.param(True, marks=pytest.mark.full)])
def test_requeued_and_followed_it_writes_the_same_metrics(slurm: Cluster, calm: Calm, preempted: bool) -> None:
    """Requeue a run by SIGUSR1, or by a preemption after that, too: it saves and resumes exactly, each time.

    Before the end of the allocation it submits its successor, as requeue is forbidden by then. Steps in flight are
    finished or dropped. The roles: actor with two ranks on two nodes, critic, reference, two engines, on three nodes.
    """
    run_dir, holds = slurm.shared / f"requeued_{preempted}", Holds(calm.work / "run.toml")
    alive_s = calm.start_s + scaled(4)
    limit_min = math.ceil((alive_s + scaled(20)) / 60)
    requeues = 2 if preempted else 1
    length = (
        f"--train.max_steps={STEPS}",
        "--train.num_episodes=10",
        f"--slurm.signal_lead_s={60 * limit_min - alive_s:.0f}",
    )
    config = CHECKOUT / "sbatch" / "ppo_32b.toml"
    job = slurm.submit(config, run_dir, [*NODES, "--requeue", "--time=20"], *calm.overrides, *length)

    wait_for_another_step(slurm, run_dir)
    slurm.run("scancel", "--batch", "--signal=USR1", str(job))
    wait_for_restart(slurm, job, run_dir, 1)

    if preempted:
        preempt(slurm, job, run_dir, holds)
    # From here on this job may not be requeued, and its time is short.
    slurm.run("scontrol", "update", f"JobId={job}", "Requeue=0", f"TimeLimit={limit_min}")
    slurm.start_soon(job)
    slurm.wait_until(lambda: slurm.job(job)["JobState"] == "RUNNING", "next start")
    done = steps(run_dir)
    slurm.wait_until(lambda: steps(run_dir) > done or slurm.job(job)["JobState"] != "RUNNING", "step")
    holds.hold("reward-hang")
    assert slurm.wait_over(job) == ("COMPLETED", 0), said(run_dir)
    holds.let_go("reward-hang")
    assert "stopped by the end of the allocation is near; saved at step" in said(run_dir)
    assert "requeue is not allowed here (Requested operation is presently disabled for job" in said(run_dir)

    (follower,) = followers(run_dir)
    last, first = slurm.job(follower), slurm.job(job)
    slurm.run("scontrol", "update", f"JobId={follower}", "TimeLimit=20")  # it looks at the clock in a second or two
    assert last["NumNodes"] in ("3-3", "3")  # as Slurm says it of a job that waits, and later
    assert {name: last[name] for name in CARRIED} == {name: first[name] for name in CARRIED}
    assert slurm.wait_over(follower) == ("COMPLETED", 0), said(run_dir)
    assert slurm.job(follower)["Requeue"] == "0"
    assert load_config(run_dir / "config.toml", []).data.input_template == "1 + {}"
    assert summary(run_dir)["status"] == "finished"
    assert (run_dir / "final" / "config.json").exists()
    assert said(run_dir).count("resuming from") == requeues + 1
    assert timeless(metrics(run_dir)) == calm.metrics
    assert_report_shows(run_dir, requeues=requeues + 1)


def preempt(slurm: Cluster, job: int, run_dir: Path, holds: Holds) -> None:
    """A job that comes first takes the nodes after the next step, and has ended when this returns."""
    wait_for_another_step(slurm, run_dir)
    holds.hold("reward-hang")  # no step ends any more: what is in flight is dropped
    release = slurm.shared / f"{run_dir.name}.release"
    urgent = slurm.sbatch(
        *("--partition=high", "--nodes=3", "--nodelist=gpu[001-003]", "--gres=gpu:8", "--output=/dev/null"),
        f"--wrap=until [ -e {release} ]; do sleep 0.2; done",
    )
    wait_for_restart(slurm, job, run_dir, 2)
    slurm.wait_until(lambda: slurm.job(urgent)["JobState"] == "RUNNING", "start of the urgent job")
    assert "was asked to terminate" in next((run_dir / "logs").glob("conductor.*.log")).read_text()
    holds.let_go("reward-hang")
    release.touch()
    assert slurm.wait_over(urgent) == ("COMPLETED", 0)


def assert_report_shows(run_dir: Path, requeues: int) -> None:
    """Each requeue stands on the time axis of the report, and a new session follows it; samples are as of one run."""
    files = RunFiles.read(RunDirectory(run_dir))
    kinds = [event.event for event in files.events if event.event in ("start", "stop", "requeue", "resume", "finish")]
    assert kinds == ["start", *["stop", "requeue", "resume"] * requeues, "finish"]
    stated = content([files], time.time())["runs"][0]
    assert stated["requeues"] == requeues
    assert [session["how"] for session in stated["sessions"]] == ["stop"] * requeues + ["finish"]
    assert [sample.step for sample in files.samples] == sorted([*range(1, STEPS + 1)] * 2)
    assert (run_dir / "report.html").read_text().count('"event":"requeue"') == requeues


def followers(run_dir: Path) -> list[int]:
    """Jobs that the run has submitted to go on."""
    return [int(number) for number in re.findall(r"job (\d+) follows this one", said(run_dir))]


# --- slurm campaign ---------------------------------------------------------------------------------------------------


SEED = 0


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("each", EACH)
def test_faults_of_a_cluster(slurm: Cluster, tmp_path: Path, each: int) -> None:
    """Nodes that crash and are cut off, ranks, srun and slurmd that are killed, slurmctld that starts anew.

    Each with `each` ranks of a role on a node; a rank that is killed is the first or the last of its role.
    """
    known = [replace(fault, limit_s=scaled(fault.limit_s)) for fault in SLURM if fault.each == each]
    faults = draw(known, len(known), SEED)
    out, steps = slurm.shared / f"campaign{each}", max(FEWEST_STEPS, STEPS_EACH * len(faults))
    leader = Leader(out, OnSlurm(slurm, SEED), SEED, steps, layout(out, each))
    rows = carried_out(leader.run(faults), SEED, tmp_path)
    assert [f"{row.fault}: {'; '.join(row.problems)}" for row in rows if not row.good] == []
    assert [row.fault for row in rows if not row.compared] == []  # the calm run was longer
    assert len(rows) == len(known)


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_a_spare_node_that_dies_while_it_takes_over_is_replaced_by_the_next(slurm: Cluster, tmp_path: Path) -> None:
    """Nobody on it has said hello: it is known by the silence of its agent while the other node is heard."""
    (fault,) = (one for one in SLURM if "one after the other" in one.name and one.each == 1)
    leader = Leader(slurm.shared / "spares", OnSlurm(slurm, SEED), SEED, FEWEST_STEPS, SPARES)
    (row,) = carried_out(leader.run([fault]), SEED, tmp_path)
    assert row.good, row.problems
    assert row.outcome == RECOVERED
    assert row.equal
    assert re.search(r"rank 1 on \w+ is lost before its hello: nothing was heard of the node for 12 s", row.said), (
        row.said
    )
