"""Runs as jobs of a real Slurm."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from checkout import MADE_HERE
from holds import Holds
from open_ports import listening
from slurm_cluster import CHECKOUT, COMMAND, ENDLESS, OVER, PLACES, SMALL, Cluster, said
from sums_task import PACE
from training_runs import is_worker, metrics, saved, steps, timeless, workspace
from waiting import HANG_S, scaled

from slurm_rlhf.wire.auth import RunKeys

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STATED_S = round(scaled(10))
"""Seconds without progress after which the second run tells of a hang."""


@pytest.fixture(scope="module")
def config(slurm: Cluster) -> Path:
    return workspace(slurm.shared / "two_runs")  # other files of tests share the cluster


def test_two_runs_share_nodes_one_loses_an_engine_and_the_other_a_node(slurm: Cluster, config: Path) -> None:
    """Run two jobs on the same nodes: they do not collide, and each has the GPUs that Slurm granted it.

    Inside salloc a killed engine on another node, the only one, is started again by a step of its own. Where no batch
    step's end cleans up, a killed actor rank then ends the run with the role's name, a true exit code, no orphan, and
    the allocation released. The end of the first is nothing to the second, which has two actor ranks on a node and
    starts them again when one is killed. So ends a job that loses a node, before Slurm itself takes the node for dead.
    """
    first, second = slurm.shared / "interactive", slurm.shared / "second"
    half = ["--nodes=3", "--nodelist=gpu[001-003]", "--gres=gpu:4", "--cpus-per-task=4", "--mem=8000"]
    holds = Holds(config)
    holds.hold(PACE, "0.1")  # runs without an end leave the cores to what is tested
    two = ("--actor.num_gpus_per_node=2", "--train.max_restarts=1", "--ckpt.save_steps=8", "--reward.workers=0")
    job = slurm.submit(config, second, half, *SMALL, *ENDLESS, *two, f"--timeout.hang={STATED_S}")
    slurm.wait_until(lambda: slurm.job(job)["JobState"] == "RUNNING", "start")
    with interactive(slurm, config, first) as login:
        slurm.wait_until(lambda: steps(first) >= 1 or login.poll() is not None, "first step")
        assert login.poll() is None, login.communicate()[0]
        slurm.wait_until(lambda: steps(second) >= 2, "second step of the other run")
        assert_devices(slurm, first, second)
        assert_ports_are_ours_alone(slurm, first, second)
        allocation = int(json.loads((first / "session.json").read_text())["job_id"])
        assert {slurm.job(number)["JobState"] for number in (job, allocation)} == {"RUNNING"}
        (engine,) = json.loads((first / "rank_map.json").read_text())["roles"]["rollout"]
        os.kill(workers(slurm, first, "rollout", engine["node"])[0], signal.SIGKILL)
        slurm.wait_until(lambda: "takes part again" in said_events(first), "return of the engine")
        done = steps(first)
        slurm.wait_until(lambda: steps(first) > done, "step after it")
        os.kill(workers(slurm, first, "actor", "gpu003")[0], signal.SIGKILL)
        words, _ = login.communicate(timeout=HANG_S)
    assert login.returncode == 1, words
    killed = rf"rank \d of engine \d on {engine['node']} \(pid \d+\) was killed by SIGKILL"
    assert re.search(rf"engine 0 on {engine['node']} is lost: {killed}. 0 of 1 engines go on", words), words
    assert re.search(r"error: role actor died: rank \d on gpu003 ", words), words
    assert not slurm.left(first, *slurm.names)  # no batch step had to end for that
    slurm.wait_until(lambda: slurm.job(allocation)["JobState"] in OVER, "release of the allocation")
    assert_a_killed_rank_is_started_again(slurm, second)
    assert slurm.job(job)["Restarts"] == "0"
    assert_hang_is_reported_every_node(slurm, second, holds)

    slurm.cluster("crash", "gpu002")  # one of the actor's ranks is there: the other's collective breaks at once
    slurm.wait_until(lambda: slurm.job(job)["JobState"] != "RUNNING", "end of the job")
    slurm.wait_until(lambda: not slurm.left(second, "gpu001", "gpu003"), "end of its processes")
    # Slurm had not informed the job: its node still counts as alive.
    assert "DOWN" not in slurm.run("sinfo", "-h", "-N", "-n", "gpu002", "-o", "%T").upper()
    slurm.restart("gpu002")
    assert slurm.job(job)["ExitCode"] == "1:0"
    named = re.search(
        r"error: role (\w+) died: rank (\d) on gpu002 .* is lost.*\n(?:.*\n)*?The last lines of (.*):", said(second)
    )
    assert named, said(second)
    assert named[3] == str(second / "logs" / f"{named[1]}.gpu002.{named[2]}.log")
    assert "Traceback" not in said(second)


def assert_a_killed_rank_is_started_again(slurm: Cluster, run_dir: Path) -> None:
    """One of two actor ranks on a node is killed: it is named, no preemption is seen, and the steps come out the same.

    Its torchrun ends the other, which takes SIGTERM for that of a preemption.
    """
    # A checkpoint comes every eight steps: some are there to be lost, and some are left until the signal comes.
    slurm.wait_until(lambda: saved(run_dir) and 1 < steps(run_dir) - saved(run_dir)[-1] < 5, "steps after a checkpoint")
    known = workers(slurm, run_dir, "actor", "gpu002")
    assert len(known) == 2
    os.kill(known[-1], signal.SIGKILL)
    before = metrics(run_dir)
    slurm.wait_until(lambda: "restart 1 of 1 in this job" in said_events(run_dir), "restart of the actor")
    slurm.wait_until(lambda: steps(run_dir) > len(before) + 1, "steps after it")
    after = metrics(run_dir)[: len(before)]
    assert timeless(after) == timeless(before)
    assert after != before  # some were done once more
    assert re.search(r"role actor died: rank [23] on gpu002 \(pid \d+\) was killed by SIGKILL", said_events(run_dir))
    assert "was asked to terminate" not in (run_dir / "logs" / "conductor.gpu001.0.log").read_text()


def assert_hang_is_reported_every_node(slurm: Cluster, run_dir: Path, holds: Holds) -> None:
    """The reward function hangs for a while: the agents look at the ranks of all nodes, and the run goes on."""
    holds.hold("reward-hang")
    slurm.wait_until(lambda: any(run_dir.glob("hang-*/nodes.txt")), "report of the hang")
    holds.let_go("reward-hang")
    (stated,) = run_dir.glob("hang-*")
    report = (stated / "report.txt").read_text()
    assert "behind is the reward function, at reward_func" in report
    known = json.loads((run_dir / "rank_map.json").read_text())["roles"]
    used = sorted({share["node"] for shares in known.values() for share in shares})
    loads = [line.partition(": load ")[0] for line in (stated / "nodes.txt").read_text().splitlines()]
    assert loads == used
    assert "was not looked at from outside" not in report
    before = steps(run_dir)
    slurm.wait_until(lambda: steps(run_dir) > before + 1, "step after the hang")
    assert "the run goes on" in said(run_dir)


@contextmanager
def interactive(slurm: Cluster, config: Path, run_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """A run inside salloc on gpu002 and gpu003, of which Slurm gives it 4 GPUs here and 2 there."""
    words = ["salloc", "--nodes=2", "--nodelist=gpu[002-003]", "--ntasks-per-node=1", "--gpus=6"]
    words += ["--cpus-per-task=4", "--mem=8000"]
    train = [COMMAND, "train", str(config), f"--run_dir={run_dir}", *PLACES, *SMALL, *ENDLESS, "--train.max_restarts=0"]
    with subprocess.Popen(
        [str(slurm.script), "login", *words, *train],
        env=slurm.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as login:
        try:
            yield login
        finally:
            login.kill()


def assert_devices(slurm: Cluster, first: Path, second: Path) -> None:
    """Each actor has one or two of the GPUs that Slurm gave to its own job on its node."""
    granted = {}
    for run_dir, nodes, ranks in ((first, ("gpu002", "gpu003"), 1), (second, ("gpu001", "gpu002"), 2)):
        for node in nodes:
            found = environment(workers(slurm, run_dir, "actor", node)[0])
            granted[run_dir, node] = found["SLURM_STEP_GPUS"].split(",")
            assert found["CUDA_VISIBLE_DEVICES"].split(",") == granted[run_dir, node][:ranks]
    assert granted[second, "gpu002"] == ["0", "1", "2", "3"]
    assert granted[first, "gpu002"] == ["4", "5", "6", "7"]
    assert granted[first, "gpu003"] == ["4", "5"]


def assert_ports_are_ours_alone(slurm: Cluster, *run_dirs: Path) -> None:
    """Check that ports listen on loopback or the node's address in the cluster: torchrun's stores, too, as with GPUs.

    The keys are in a file that nobody else can read, and in no command line, environment, log or record of the job.
    """
    keys = [RunKeys.load(run_dir / ".control" / "keys.json") for run_dir in run_dirs]
    secrets = [text for each in keys for text in (each.server_secret, each.client_secret)]
    heard: set[str] = set()
    for node in slurm.names:
        ours = [(pid, line) for pid, line in slurm.numbered(node) if any(str(each) in line for each in run_dirs)]
        # srun and the shell around it are Slurm's; srun listens on all addresses, and asks who comes for a credential.
        ours = [(pid, line) for pid, line in ours if not line.startswith(("srun ", "salloc ", "/bin/bash"))]
        own = {"127.0.0.1", slurm.address(node)}
        found = listening(pid for pid, _ in ours)
        assert {each.address for each in found} <= own, [each for each in found if each.address not in own]
        heard |= {each.address for each in found}
        for pid, line in ours:
            assert not any(text in line for text in secrets)
            assert not any(text in Path(f"/proc/{pid}/environ").read_text(errors="replace") for text in secrets)
    assert len(heard) > 2  # the runs talk over the network of the cluster
    jobs = slurm.run("scontrol", "show", "job", "-d")
    for run_dir in run_dirs:
        file = run_dir / ".control" / "keys.json"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        for other in run_dir.rglob("*"):
            if other.is_file() and other != file:
                jobs += other.read_text(errors="replace")
    assert not any(text in jobs for text in secrets)


def workers(slurm: Cluster, run_dir: Path, role: str, node: str) -> list[int]:
    """Process ids of a role's ranks on a node."""
    words = (f"--role={role}", f"--run_dir={run_dir}")
    return [pid for pid, line in slurm.numbered(node) if all(word in line for word in words) and is_worker(line)]


def said_events(run_dir: Path) -> str:
    return (run_dir / "events.jsonl").read_text()


def environment(pid: int) -> dict[str, str]:
    pairs = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


BAD = """
try() {
  timeout {hang} {command} train {config} --eval.dataset= --preflight=quick "$@" 2>&1
  echo "status $?"
}
try --run_dir=/tmp/private --actor.num_nodes=2
try --run_dir={shared}/bad --actor.num_gpus_per_node=16
try --run_dir={shared}/bad --actor.num_nodes=8
PYTHONPATH=/tmp/site try --run_dir={shared}/bad --actor.num_nodes=2
"""


def test_bad_input_is_named_before_any_model_loads(slurm: Cluster, config: Path) -> None:
    script = slurm.shared / "bad.sh"
    words = {"hang": f"{HANG_S:.0f}", "command": COMMAND, "config": config, "shared": slurm.shared}
    script.write_text("#!/bin/bash" + re.sub(r"\{(\w+)\}", lambda found: str(words[found[1]]), BAD))
    other = "/tmp/site/numpy-1.0.0.dist-info"
    metadata = "Metadata-Version: 2.1\\nName: numpy\\nVersion: 1.0.0\\n"
    slurm.cluster("exec", "gpu002", "bash", "-c", f"mkdir -p {other} && printf '{metadata}' >{other}/METADATA")
    output = slurm.shared / "bad.log"
    job = slurm.sbatch("--nodes=2", "--ntasks-per-node=1", "--gres=gpu:8", f"--output={output}", str(script))
    assert slurm.wait_over(job) == ("COMPLETED", 0)
    said = output.read_text()
    answers = re.split(r"^status .*\n", said, flags=re.MULTILINE)
    assert re.findall(r"^status (\d+)$", said, re.MULTILINE) == ["2"] * 4, said
    private, wide, many, unlike, _ = answers
    assert "run_dir /tmp/private is not shared by all nodes: gpu002 cannot see what gpu001 wrote there" in private
    assert "actor.num_gpus_per_node = 16, but the largest node, gpu001, has 8 GPUs" in wide
    assert "actor.num_nodes = 8, but there are 2 nodes" in many
    assert "gpu002: numpy 1.0.0, here " in unlike
    assert "Traceback" not in said
    assert [path.name for path in (slurm.shared / "bad" / "logs").iterdir()] == ["nodes.srun.log"]


# --- slurm quickstart -------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not MADE_HERE, reason="this environment was not made by sbatch/environment.sh")
def test_the_quickstart_is_a_batch_script(slurm: Cluster) -> None:
    """Shortened by overrides alone. The data and the model are those of the last quickstart here, if there was one."""
    run_dir = slurm.shared / "quickstart"
    job = slurm.sbatch(
        *(f"--output={run_dir}.log", "sbatch/quickstart.sh", f"--run_dir={run_dir}", "--train.max_steps=2"),
        *("--recipe=grpo", "--eval.max_samples=64"),
        cwd=CHECKOUT,
    )
    ended = slurm.wait_over(job)
    said = Path(f"{run_dir}.log").read_text()
    assert ended == ("COMPLETED", 0), said
    assert f"{CHECKOUT}/.venv is current" in said
    assert "4/4 grpo" in said
    assert f"job {job} on gpu001, run directory {run_dir}" in said
    assert f"to look inside: srun --jobid={job} " in said
    assert len(metrics(run_dir)) == 2
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["world"] == {"actor": 1, "rollout": 1}
    logs = {path.name for path in (run_dir / "logs").iterdir()}
    assert logs >= {"actor.gpu001.0.log", "rollout.gpu001.0.log", "actor.srun.log"}  # steps of the job, not children
    assert not slurm.processes("gpu001")
