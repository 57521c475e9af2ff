"""Whole runs under a real slurmctld, on four emulated nodes: how they are placed, and how they end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from slurm_nodes import CHECKOUT, SlurmNodes, slurm
from training_runs import metrics, workspace

from slurm_rlhf.checkpoint.directory import CheckpointDir
from slurm_rlhf.launch.ports import ephemeral_start, meeting_port

__all__ = ["slurm"]
pytestmark = pytest.mark.timeout(300)

COMMAND = str(CHECKOUT / ".venv" / "bin" / "slurm-rlhf")
PLACES = ("--actor.num_nodes=2", "--vllm.num_engines=2", "--vllm.num_nodes=2", "--train.threads_per_rank=1")
"""Actor with two ranks on two nodes, critic, reference, two engines on different nodes."""
SMALL = ("--vllm.num_engines=1", "--vllm.num_nodes=1", "--algo.kl.init_coef=0", "--eval.dataset=")
"""Fewer processes to start, where it is not they that matter."""
ENDLESS = ("--train.max_steps=100000", "--train.num_episodes=100000", "--eval.dataset=")
TINY = (
    *("--actor.num_gpus_per_node=1", "--critic.num_nodes=1", "--critic.num_gpus_per_node=1", "--ref.num_nodes=1"),
    *("--data.apply_chat_template=false", "--data.max_len=64", "--ds.param_dtype=fp32", "--rollout.batch_size=8"),
    *("--rollout.max_new_tokens=8", "--train.batch_size=16", "--train.max_steps=2", "--vllm.max_num_seqs=16"),
)
HOLD = """
import socket, sys, time
server = socket.create_server(("", int(sys.argv[1])))
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def config(slurm: SlurmNodes) -> Path:
    return workspace(slurm.shared / "work")


def submit(slurm: SlurmNodes, config: Path, run_dir: Path, options: list[str], *overrides: str) -> int:
    """A job that execs the conductor, as the sbatch files do."""
    script = run_dir.with_suffix(".sh")
    script.write_text(f'#!/bin/bash\nexec {COMMAND} train {config} --run_dir={run_dir} "$@"\n')
    words = ["--ntasks-per-node=1", "--open-mode=append", f"--output={run_dir}.log", *options]
    return slurm.sbatch(*words, str(script), *PLACES, *overrides)


def steps(run_dir: Path) -> int:
    return len(metrics(run_dir))


def test_the_unedited_ppo_32b_trains_a_tiny_model_on_four_nodes(slurm: SlurmNodes, config: Path) -> None:
    work, run_dir = config.parent, slurm.shared / "large"
    job = slurm.sbatch(
        *("--hold", "--nodes=4", f"--output={run_dir}.log", "sbatch/ppo_32b.sh", f"--run_dir={run_dir}"),
        *(f"--actor.model_name_or_path={work / 'model'}", f"--data.prompt_dataset={work / 'prompts.jsonl'}"),
        *(f"--reward.remote_url={work / 'reward.py'}", *PLACES, *TINY),
        cwd=CHECKOUT,
    )
    port = meeting_port(job, 0, 0, 0, ephemeral_start())
    hold = [str(slurm.script), "exec", "gpu001", "python3", "-c", HOLD, str(port)]
    with subprocess.Popen(hold, env=slurm.environment, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            slurm.run("scontrol", "release", str(job))
            assert slurm.wait_over(job, 150) == ("COMPLETED", 0), Path(f"{run_dir}.log").read_text()
        finally:
            holder.kill()
    said = Path(f"{run_dir}.log").read_text()
    assert f"srun --jobid={job} --overlap --pty" in said
    assert steps(run_dir) == 2
    logs = {path.name for path in (run_dir / "logs").iterdir()}
    assert logs >= {
        *("conductor.gpu001.0.log", "actor.gpu001.0.log", "actor.gpu002.1.log", "critic.gpu001.0.log"),
        *("reference.gpu002.0.log", "rollout.gpu003.0.log", "rollout.gpu004.1.log"),
    }
    ranks = json.loads((run_dir / "rank_map.json").read_text())
    assert [(share["node"], share["gpus"]) for share in ranks["roles"]["actor"]] == [("gpu001", [0]), ("gpu002", [0])]
    meetings = re.findall(r"meet at gpu001:(\d+)", (run_dir / "logs" / "actor.gpu001.torchrun.log").read_text())
    assert meetings[0] == str(port)
    assert len(meetings) == 2  # the port was taken, and the next one was not
    assert "NCCL_SOCKET_IFNAME=eth0" in (run_dir / "logs" / "actor.gpu002.torchrun.log").read_text()
    assert not any(slurm.processes(node) for node in slurm.names)


def test_two_runs_share_nodes_one_is_cancelled_and_the_other_loses_a_node(slurm: SlurmNodes, config: Path) -> None:
    first, second = slurm.shared / "first", slurm.shared / "second"
    half = ["--nodes=3", "--nodelist=gpu[001-003]", "--gres=gpu:4", "--cpus-per-task=4", "--mem=8000"]
    common = (*SMALL, *ENDLESS, "--ckpt.save_steps=1")
    jobs = [submit(slurm, config, first, half, *common, "--actor.num_nodes=1")]
    jobs += [submit(slurm, config, second, half, *common)]
    for run in (first, second):
        slurm.wait_until(lambda run=run: steps(run) >= 2, f"second step of {run.name}", 120)
    assert {slurm.job(job)["JobState"] for job in jobs} == {"RUNNING"}

    slurm.run("scancel", str(jobs[0]))
    slurm.wait_over(jobs[0], 30)
    saved = CheckpointDir(first).latest()
    assert saved is not None
    assert CheckpointDir(first).load_state(saved)["run"]["step"] >= 1
    done = steps(second)
    slurm.wait_until(lambda: steps(second) > done + 1, "next step of the other run", 30)
    slurm.wait_until(lambda: not left(slurm, first, "gpu001", "gpu002", "gpu003"), "end of its processes", 30)

    slurm.cluster("crash", "gpu002")  # and with it one of the actor's ranks: the other's collective breaks at once
    ended = slurm.wait_until(lambda: slurm.job(jobs[1])["JobState"] != "RUNNING", "end of the job", 30)
    clean = slurm.wait_until(lambda: not left(slurm, second, "gpu001", "gpu003"), "end of its processes", 30 - ended)
    slurm.cluster("restart", "gpu002")
    assert ended + clean < 30  # SlurmdTimeout is 300 s
    assert slurm.job(jobs[1])["ExitCode"] == "1:0"
    said = Path(f"{second}.log").read_text()
    named = re.search(
        r"error: role (\w+) died: rank (\d) on gpu002 .* is lost.*\n(?:.*\n)*?The last lines of (.*):", said
    )
    assert named, said
    assert named[3] == str(second / "logs" / f"{named[1]}.gpu002.{named[2]}.log")
    assert "Traceback" not in said


def left(slurm: SlurmNodes, run_dir: Path, *nodes: str) -> list[str]:
    return [line for node in nodes for line in slurm.processes(node) if str(run_dir) in line]


def test_inside_salloc_on_unlike_nodes_a_killed_engine_on_another_one_ends_the_run(
    slurm: SlurmNodes, config: Path
) -> None:
    """Of 12 GPUs on two nodes Slurm gives 8 on one and 4 on the other."""
    run_dir = slurm.shared / "interactive"
    words = ["salloc", "--nodes=2", "--ntasks-per-node=1", "--gpus=12", "--cpus-per-task=4"]
    train = [COMMAND, "train", str(config), f"--run_dir={run_dir}", *PLACES, *ENDLESS, "--algo.kl.init_coef=0"]
    with subprocess.Popen(
        [str(slurm.script), "login", *words, *train],
        env=slurm.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as login:
        try:
            slurm.wait_until(lambda: steps(run_dir) >= 1 or login.poll() is not None, "first step", 120)
            assert login.poll() is None, login.communicate()[0]
            granted = {node: environment(worker(slurm, run_dir, "actor", node)) for node in ("gpu001", "gpu002")}
            assert granted["gpu001"]["SLURM_STEP_GPUS"] == "0,1,2,3,4,5,6,7"
            assert granted["gpu002"]["SLURM_STEP_GPUS"] == "0,1,2,3"
            assert {found["CUDA_VISIBLE_DEVICES"] for found in granted.values()} == {"0"}
            os.kill(worker(slurm, run_dir, "rollout", "gpu002"), signal.SIGKILL)
            said, _ = login.communicate(timeout=30)
        finally:
            login.kill()
    assert login.returncode == 1, said
    assert re.search(r"error: role rollout died: its process group on gpu002 ended", said)
    assert not any(left(slurm, run_dir, node) for node in slurm.names)  # though no batch step ended
    slurm.wait_until(lambda: not slurm.run("squeue", "-h"), "release of the allocation", 10)


def worker(slurm: SlurmNodes, run_dir: Path, role: str, node: str) -> int:
    """Process id of a role's only rank on a node: torchrun was there before its worker."""
    words = (f"--role={role}", f"--run_dir={run_dir}")
    return max(pid for pid, line in slurm.numbered(node) if all(word in line for word in words))


def environment(pid: int) -> dict[str, str]:
    pairs = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


BAD = """
try() { timeout 60 {command} train {config} --eval.dataset= "$@" 2>&1; echo "status $? after $SECONDS s"; SECONDS=0; }
SECONDS=0
try --run_dir=/tmp/private --actor.num_nodes=2
try --run_dir={shared}/bad --actor.num_gpus_per_node=16
try --run_dir={shared}/bad --actor.num_nodes=8
PYTHONPATH=/tmp/site try --run_dir={shared}/bad --actor.num_nodes=2
"""


def test_bad_input_is_named_in_seconds_and_before_any_model_loads(slurm: SlurmNodes, config: Path) -> None:
    script = slurm.shared / "bad.sh"
    script.write_text(
        "#!/bin/bash"
        + BAD.replace("{command}", COMMAND).replace("{config}", str(config)).replace("{shared}", str(slurm.shared))
    )
    other = "/tmp/site/numpy-1.0.0.dist-info"
    metadata = "Metadata-Version: 2.1\\nName: numpy\\nVersion: 1.0.0\\n"
    slurm.cluster("exec", "gpu002", "bash", "-c", f"mkdir -p {other} && printf '{metadata}' >{other}/METADATA")
    output = slurm.shared / "bad.log"
    job = slurm.sbatch("--nodes=2", "--ntasks-per-node=1", "--gres=gpu:8", f"--output={output}", str(script))
    assert slurm.wait_over(job, 60) == ("COMPLETED", 0)
    said = output.read_text()
    answers = re.split(r"^status .*\n", said, flags=re.MULTILINE)
    ends = re.findall(r"^status (\d+) after (\d+) s$", said, re.MULTILINE)
    assert [status for status, _ in ends] == ["2"] * 4, said
    assert all(int(seconds) < 15 for _, seconds in ends), said
    private, wide, many, unlike, _ = answers
    assert "run_dir /tmp/private is not shared by all nodes: gpu002 cannot see what gpu001 wrote there" in private
    assert "actor.num_gpus_per_node = 16, but the largest node, gpu001, has 8 GPUs" in wide
    assert "actor.num_nodes = 8, but there are 2 nodes" in many
    assert "gpu002: numpy 1.0.0, here " in unlike
    assert "Traceback" not in said
    assert not (slurm.shared / "bad" / "logs").exists()
