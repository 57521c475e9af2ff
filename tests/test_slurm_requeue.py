"""A run that Slurm ends again and again, by every way it has, writes the numbers of one that was left alone."""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from slurm_nodes import SlurmNodes, slurm
from test_slurm_run import ENDLESS, left, steps, submit
from training_runs import metrics, timeless, workspace

from slurm_rlhf.config.load import load_config

__all__ = ["slurm"]
pytestmark = pytest.mark.timeout(600)

STEPS = 20
TEMPLATE = "--data.input_template=1 + {}"
"""An argument with blanks."""
SETTINGS = ("--ckpt.save_steps=0", "--eval.steps=10", TEMPLATE)
NODES = ["--nodes=3", "--gres=gpu:8", "--cpus-per-task=4", "--mem=8000"]
GRACE_S = 10  # GraceTime of the partition
REWARD = """
import pathlib, time

HOLD = pathlib.Path(__file__).with_name("hold")

def reward_func(queries, prompts, labels, **kwargs):
    while HOLD.exists():
        time.sleep(0.1)
    hits = [float(label in response) for label, response in zip(labels, kwargs["responses"])]
    return {"rewards": hits, "scores": hits}
"""
CARRIED = ("JobName", "Partition", "TimeLimit", "CPUs/Task", "MinMemoryNode", "TresPerNode", "StdOut")


@pytest.fixture(scope="module")
def config(slurm: SlurmNodes) -> Path:
    return workspace(slurm.shared / "requeue", REWARD)


@dataclass(frozen=True, slots=True)
class Calm:
    """A run that was left alone: its metrics, and how long it takes to its first step here."""

    metrics: list[str]
    start_s: float


@pytest.fixture(scope="module")
def calm(slurm: SlurmNodes, config: Path) -> Calm:
    """It ends by a stop file, after a save file that it must survive."""
    run_dir = slurm.shared / "calm"
    job = submit(slurm, config, run_dir, NODES, *ENDLESS[:2], *SETTINGS)
    slurm.wait_until(lambda: slurm.job(job)["JobState"] == "RUNNING", "start", 30)
    start_s = slurm.wait_until(lambda: steps(run_dir) >= 1, "first step", 150)
    (run_dir / "save").touch()
    slurm.wait_until(lambda: saved(run_dir) != [], "checkpoint", 30)
    at = saved(run_dir)[0]
    assert not (run_dir / "save").exists()
    slurm.wait_until(lambda: steps(run_dir) >= max(STEPS, at + 2), f"step {STEPS}", 120)
    (run_dir / "stop").touch()
    assert slurm.wait_over(job, 40) == ("COMPLETED", 0), said(run_dir)
    assert "stopped by a file named stop in the run directory; saved at step" in said(run_dir)
    assert summary(run_dir)["status"] == "stopped"
    assert saved(run_dir) == [at, summary(run_dir)["steps"]]
    assert slurm.job(job)["Restarts"] == "0"
    assert not slurm.run("squeue", "-h").strip()
    return Calm(timeless(metrics(run_dir)[:STEPS]), start_s)


def saved(run_dir: Path) -> list[int]:
    """Steps of the checkpoints that are complete."""
    names = [path.name.removeprefix("step_") for path in (run_dir / "checkpoints").glob("step_*")]
    return sorted(int(name) for name in names if name.isdigit())


def said(run_dir: Path) -> str:
    return Path(f"{run_dir}.log").read_text()


def summary(run_dir: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((run_dir / "summary.json").read_text())
    return found


def wait_for_another_step(slurm: SlurmNodes, run_dir: Path) -> None:
    done = steps(run_dir)
    slurm.wait_until(lambda: steps(run_dir) > done, f"step {done + 1}", 150)


def wait_for_restart(slurm: SlurmNodes, job: int, run_dir: Path, restart: int) -> None:
    """Everything is saved, and nothing runs any more."""
    slurm.wait_until(lambda: slurm.job(job)["Restarts"] == str(restart), f"restart {restart}", 60)
    assert summary(run_dir)["status"] == "stopped"
    assert saved(run_dir)[-1] == summary(run_dir)["steps"]
    gone = slurm.wait_until(
        lambda: not any(left(slurm, run_dir, node) for node in slurm.names), "end of its processes", 20
    )
    assert gone < 12  # it does not sit out Slurm's KillWait, nor its own patience


def test_requeued_preempted_and_followed_it_writes_the_same_metrics(
    slurm: SlurmNodes, config: Path, calm: Calm
) -> None:
    run_dir, hold = slurm.shared / "requeued", config.with_name("hold")
    alive_s = 1.4 * calm.start_s + 6
    limit_min = math.ceil((alive_s + 20) / 60)
    length = (
        f"--train.max_steps={STEPS}",
        "--train.num_episodes=10",
        f"--slurm.signal_lead_s={60 * limit_min - alive_s:.0f}",
    )
    job = submit(slurm, config, run_dir, [*NODES, "--requeue", "--time=20"], *length, *SETTINGS)

    wait_for_another_step(slurm, run_dir)
    slurm.run("scancel", "--batch", "--signal=USR1", str(job))
    wait_for_restart(slurm, job, run_dir, 1)

    wait_for_another_step(slurm, run_dir)
    hold.touch()  # no step ends any more: what is in flight is dropped
    release = slurm.shared / "release"
    urgent = slurm.sbatch(
        *("--partition=high", "--nodes=3", "--nodelist=gpu[001-003]", "--gres=gpu:8", "--output=/dev/null"),
        f"--wrap=until [ -e {release} ]; do sleep 0.2; done",
    )
    begin = time.monotonic()
    wait_for_restart(slurm, job, run_dir, 2)
    slurm.wait_until(lambda: slurm.job(urgent)["JobState"] == "RUNNING", "start of the urgent job", 30)
    assert time.monotonic() - begin < GRACE_S + 15
    assert "was told to terminate" in next((run_dir / "logs").glob("conductor.*.log")).read_text()
    # From here on this job may not be requeued, and its time is short.
    slurm.run("scontrol", "update", f"JobId={job}", "Requeue=0", f"TimeLimit={limit_min}")
    hold.unlink()
    release.touch()
    assert slurm.wait_over(urgent, 30) == ("COMPLETED", 0)

    slurm.wait_until(lambda: slurm.job(job)["JobState"] == "RUNNING", "next start", 60)
    done = steps(run_dir)
    slurm.wait_until(lambda: steps(run_dir) > done or slurm.job(job)["JobState"] != "RUNNING", "step", 150)
    hold.touch()
    assert slurm.wait_over(job, alive_s + 30) == ("COMPLETED", 0), said(run_dir)
    hold.unlink()
    assert "stopped by the end of the allocation is near; saved at step" in said(run_dir)
    assert "requeue is not allowed here (Requested operation is presently disabled for job" in said(run_dir)

    (follower,) = followers(run_dir)
    last, first = slurm.job(follower), slurm.job(job)
    slurm.run("scontrol", "update", f"JobId={follower}", "TimeLimit=20")  # it looks at the clock in a second or two
    assert last["NumNodes"] in ("3-3", "3")  # as Slurm says it of a job that waits, and later
    assert {name: last[name] for name in CARRIED} == {name: first[name] for name in CARRIED}
    assert slurm.wait_over(follower, 200) == ("COMPLETED", 0), said(run_dir)
    assert slurm.job(follower)["Requeue"] == "0"
    assert load_config(run_dir / "config.toml", []).data.input_template == "1 + {}"
    assert summary(run_dir)["status"] == "finished"
    assert (run_dir / "final" / "config.json").exists()
    assert said(run_dir).count("resuming from") == 3
    assert timeless(metrics(run_dir)) == calm.metrics


def followers(run_dir: Path) -> list[int]:
    """Jobs that the run has submitted to go on."""
    return [int(number) for number in re.findall(r"job (\d+) follows this one", said(run_dir))]
