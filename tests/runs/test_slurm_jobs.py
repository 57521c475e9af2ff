"""Jobs that submitit submits, chains of jobs, ranks in a container: on a real Slurm."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from programs import write_program
from slurm_cluster import CHECKOUT, COMMAND, Cluster
from training_runs import finished, metrics, timeless, workspace

from slurm_rlhf.cluster.slurm_job import parse_jobs
from slurm_rlhf.config.load import load_config
from slurm_rlhf.nodes.submitit_job import SIGNAL, submit

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STEPS = 24
LENGTH = (f"--train.max_steps={STEPS}", "--train.num_episodes=4")
WORLD = (
    *("--algo.advantage.estimator=group_norm", "--algo.kl.init_coef=0", "--eval.dataset="),
    *("--train.threads_per_rank=1", *LENGTH),
)
NODES = ("--vllm.num_nodes=1", "--vllm.num_engines=1")

APPTAINER = """#!/bin/bash
# A stand-in: takes its own options and the image, and runs the rest. What poisons the host is not inside.
echo "$HOSTNAME $*" >>{log}
[[ $1 == exec ]] || exit 9
shift
while [[ $1 == --* ]]; do shift; done
shift
unset PYTHONPATH
exec "$@"
"""

CHAIN = """#!/bin/bash
export PATH={bin}:$PATH PYTHONPATH={poison}
exec {command} train {config} --run_dir={run_dir} --slurm.chain=true --slurm.container=/images/rlhf.sif \\
  --slurm.container_python={python} "$@"
"""


@pytest.fixture(scope="module")
def config(slurm: Cluster) -> Path:
    return workspace(slurm.shared / "work")


@contextmanager
def client(slurm: Cluster) -> Iterator[pytest.MonkeyPatch]:
    """Make this process one on the login node."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PATH", "SLURM_CONF"):
            patch.setenv(name, slurm.environment[name])
        yield patch


@pytest.fixture(scope="module")
def calm(config: Path) -> list[str]:
    """Metrics of the same run left alone, without Slurm."""
    run_dir = config.parent / "calm"
    finished(config, run_dir, *WORLD)
    return timeless(metrics(run_dir))


def wait_for_step(slurm: Cluster, run_dir: Path, step: int) -> None:
    slurm.wait_until(lambda: len(metrics(run_dir)) >= step, f"step {step} of {run_dir.name}")


def wait_for_restart(slurm: Cluster, job: int, run_dir: Path, restart: int) -> None:
    """Wait until the run has saved and its job is back in the queue."""
    slurm.wait_until(lambda: slurm.job(job)["Restarts"] == str(restart), f"restart {restart}")
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "stopped"


def test_submitit_is_preempted_and_timed_out_goes_on_and_gives_the_summary(
    slurm: Cluster, config: Path, calm: list[str]
) -> None:
    """Submit by the Python call, preempt the job, and end its time.

    Preemption and the signal before the end of the time both go through submitit's checkpoint protocol, both end in an
    exact resume, and `result()` gives the summary.
    """
    run_dir = slurm.shared / "submitit"
    keys = ["--slurm.time=10", "--slurm.signal_lead_s=60", "--slurm.mem=8000", "--slurm.partition=gpu"]
    with client(slurm):
        job = submit(load_config(config, [f"--run_dir={run_dir}", *WORLD, *NODES, *keys, "--slurm.nodes=2"]))
        number = int(job.job_id)
        wait_for_step(slurm, run_dir, 2)
        release = slurm.shared / f"{run_dir.name}.release"
        urgent = slurm.sbatch(
            *("--partition=high", "--nodes=4", "--exclusive", "--output=/dev/null"),
            f"--wrap=until [ -e {release} ]; do sleep 0.2; done",
        )
        wait_for_restart(slurm, number, run_dir, 1)
        slurm.wait_until(lambda: slurm.job(urgent)["JobState"] == "RUNNING", "start of the urgent job")
        assert slurm.job(number)["JobState"] == "PENDING"
        release.touch()
        assert slurm.wait_over(urgent) == ("COMPLETED", 0)
        slurm.start_soon(number)

        wait_for_step(slurm, run_dir, len(metrics(run_dir)) + 1)
        # The end of the job's time is like this: Slurm sends the batch step what --signal=B:USR2@... asks for.
        slurm.run("scancel", "--batch", f"--signal={SIGNAL.name}", str(number))
        wait_for_restart(slurm, number, run_dir, 2)
        slurm.start_soon(number)
        assert slurm.wait_over(number) == ("COMPLETED", 0), Path(job.paths.stdout).read_text()
        result = job.result()
    assert result["status"] == "finished"
    assert result["steps"] == STEPS
    assert timeless(metrics(run_dir)) == calm
    output = Path(job.paths.stdout).read_text()
    assert len(set(re.findall(r"\(([^)]*)\) - Caught signal SIGUSR2 on gpu001: ", output))) == 2  # each is said twice
    assert output.count("resuming from") == 2
    assert "was asked to terminate" in next((run_dir / "logs").glob("conductor.*.log")).read_text()
    header = Path(job.paths.submission_file).read_text()
    assert "#SBATCH --signal=B:USR2@60\n" in header
    assert "\nsrun" not in header


@pytest.mark.full  # test_slurm_pipeline has jobs that wait for each other, test_slurm_requeue a follower
def test_a_chain_goes_on_ends_with_the_run_and_its_ranks_are_in_a_container(
    slurm: Cluster, config: Path, calm: list[str]
) -> None:
    """Run a chain of jobs whose ranks are in a container.

    The second link goes on with what the first left unfinished, to the numbers of an undisturbed run. What is left of
    the chain goes when the run is finished, at once when it already was. Ranks run in a (stand-in) container while the
    conductor has no torch at all: the one on its path raises when it is imported. `status` shows the job, the step, the
    reward, and the line to look inside.
    """
    run_dir, poison, program = slurm.shared / "chain", slurm.shared / "poison", slurm.shared / "bin" / "apptainer"
    for name in ("torch", "vllm", "deepspeed", "transformers"):
        (poison / name).mkdir(parents=True)
        (poison / name / "__init__.py").write_text("raise ImportError('not on the host')\n")
    write_program(program, APPTAINER.format(log=slurm.shared / "apptainer.log"))
    script = slurm.shared / "chain.sh"
    python = CHECKOUT / ".venv" / "bin" / "python"
    words = {"command": COMMAND, "config": config, "run_dir": run_dir, "python": python}
    script.write_text(CHAIN.format(bin=program.parent, poison=poison, **words))
    header = ["--nodes=2", "--ntasks-per-node=1", "--gres=gpu:8", "--mem=8000", f"--output={run_dir}.log"]
    job = slurm.sbatch("--array=1-3%1", "--open-mode=append", *header, str(script), *WORLD, *NODES)
    wait_for_step(slurm, run_dir, 1)
    with client(slurm):
        for word in (str(run_dir), str(job)):
            shown = subprocess.run([COMMAND, "status", word], capture_output=True, text=True, check=True).stdout
            assert f"job         {job}_1 on gpu[001-002]: RUNNING: it runs" in shown
            assert re.search(rf"^step        \d+/{STEPS}, reward ", shown, re.MULTILINE)
            assert re.search(
                r"^look inside srun --jobid=\d+ --overlap --pty .*--nodelist=gpu001 bash$", shown, re.MULTILINE
            )
    # For a task of an array scancel tries again until the task is gone, and then complains of that (Slurm 22.05).
    slurm.run("bash", "-c", f"scancel --batch --signal=USR1 {job}_1 || true")
    slurm.wait_until(lambda: not slurm.run("squeue", "-h"), "end of the chain")
    said = Path(f"{run_dir}.log").read_text()
    assert said.count("the next job of the chain goes on") == 1, said
    assert said.count("resuming from") == 1
    assert timeless(metrics(run_dir)) == calm
    assert said.count(f"finished {STEPS} steps") == 1, said
    assert "the jobs that waited to go on with this run are cancelled" in said
    states = {task.id: task.state for task in parse_jobs(slurm.run("scontrol", "show", "job", "-o", str(job)))}
    assert {states.pop(f"{job}_{link}") for link in (1, 2)} == {"COMPLETED"}
    assert set(states.values()) == {"CANCELLED"}
    inside = (slurm.shared / "apptainer.log").read_text().splitlines()
    roles = [line for line in inside if re.search(r"slurm_rlhf\.nodes\.agent (actor|rollout)\b", line)]
    assert len(roles) == 2 * 2  # actor and rollout: one node each, in two links
    assert all(f"exec --nv --bind={run_dir} --bind={config.parent / 'model'} /images/rlhf.sif" in r for r in roles)

    again = slurm.sbatch("--job-name=late", "--dependency=singleton", *header, str(script), *WORLD, *NODES)
    waiting = slurm.sbatch("--job-name=late", "--dependency=singleton", *header, str(script), *WORLD, *NODES)
    other = ["--job-name=late", "--dependency=singleton", *header, "--begin=now+1hour", str(script)]
    unlike = slurm.sbatch(*other, *WORLD, *NODES, f"--run_dir={run_dir}_other")
    assert slurm.wait_over(again) == ("COMPLETED", 0)
    assert "already finished" in Path(f"{run_dir}.log").read_text()
    slurm.wait_until(lambda: slurm.job(waiting)["JobState"] == "CANCELLED", "cancellation of the next one")
    assert slurm.job(unlike)["JobState"] == "PENDING"  # another run, whose name is the same
    slurm.run("scancel", str(unlike))


def test_an_array_of_seeds_and_cancel(slurm: Cluster, config: Path) -> None:
    runs = slurm.shared / "seeds"
    header = ["--nodes=1", "--gres=none", "--mem=2000", f"--output={runs}.%a.log", "--chdir", str(CHECKOUT)]
    script = str(CHECKOUT / "sbatch" / "seeds.sh")
    job = slurm.sbatch("--array=1-2", "--no-requeue", *header, script, str(config), str(runs), "--dry_run")
    slurm.wait_until(lambda: not slurm.run("squeue", "-h", "-j", str(job)), "end of the array")
    for seed in (1, 2):
        said = Path(f"{runs}.{seed}.log").read_text()
        assert f"seed = {seed}\n" in said
        assert f'run_dir = "{runs}/seed_{seed}"' in said
    held = slurm.sbatch("--hold", *header, script)
    with client(slurm):
        shown = subprocess.run([COMMAND, "status", str(held)], capture_output=True, text=True, check=True).stdout
        assert "PENDING: it waits in the queue" in shown
        assert "JobHeldUser: you hold it" in shown
        assert re.search(r"^queue +1 of 1 that wait in \w+, by priority$", shown, re.MULTILINE)
        subprocess.run([COMMAND, "cancel", str(held)], check=True)
    assert slurm.job(held)["JobState"] == "CANCELLED"
