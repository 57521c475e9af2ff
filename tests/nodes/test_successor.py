"""The job that follows where requeue is forbidden, from what a real Slurm showed; on one: test_slurm_requeue."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from waiting import HANG_S

from slurm_rlhf.cluster.stop import immune, termination
from slurm_rlhf.nodes.requeue import split_command, successor, successor_environment

SHOWN = """JobId=41 JobName=my job
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   Priority=4294901759 Nice=0 Account=(null) QOS=(null)
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=0 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   RunTime=00:00:01 TimeLimit=1-00:10:00 TimeMin=N/A
   StartTime=2026-11-21T00:05:23 EndTime=2026-11-21T00:15:23 Deadline=N/A
   Partition=gpu AllocNode:Sid=localhost:15252
   ReqNodeList=(null) ExcNodeList=gpu004
   NodeList=gpu[001-002]
   BatchHost=gpu001
   NumNodes=2 NumCPUs=4 NumTasks=2 CPUs/Task=2 ReqB:S:C:T=0:0:*:*
   TRES=cpu=4,mem=16000M,node=2,billing=4
   Socks/Node=* NtasksPerN:B:S:C=1:0:*:* CoreSpec=*
   MinCPUsNode=2 MinMemoryNode=8000M MinTmpDiskNode=0
   Features=(null) DelayBoot=00:00:00
   OverSubscribe=OK Contiguous=0 Licenses=(null) Network=(null)
   Command=/shared/job one.sh --run_dir=/a --data.input_template=a b {} --x=1
   WorkDir=/shared/a place
   Comment=a comment 
   StdErr=/shared/my job.41.log
   StdIn=/dev/null
   StdOut=/shared/my job.41.log
   Power=
   TresPerNode=gres:gpu:8,gres:nic:1
"""  # noqa: W291
ENVIRON = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_CPUS_PER_TASK": "2", "SLURM_JOB_ID": "41"}
ARGV = ["train", "/shared/run.toml", "--run_dir=/a", "--data.input_template=a b {}", "--x=1"]


def test_options_arguments_and_files_of_a_job() -> None:
    options, arguments = successor(SHOWN, ENVIRON, ARGV)
    assert arguments[-3:] == ARGV[2:]
    assert sorted(options) == sorted(
        [
            *("--job-name=my job", "--partition=gpu", "--time=1-00:10:00", "--nodes=2", "--mem=8000M"),
            *("--exclude=gpu004", "--comment=a comment", "--chdir=/shared/a place", "--ntasks=2"),
            *("--ntasks-per-node=1", "--cpus-per-task=2", "--gres=gpu:8,nic:1", "--open-mode=append"),
            *("--output=/shared/my job.41.log", "--no-requeue"),
        ]
    )


def test_gpus_are_asked_for_once_and_other_spellings_are_read() -> None:
    newer = SHOWN.replace("gres:gpu:8,gres:nic:1", "gres/gpu:h100:8,gres/nic:1").replace("Requeue=0", "Requeue=1")
    newer = newer.replace("OverSubscribe=OK", "OverSubscribe=NO").replace("StdErr=/shared/my", "StdErr=/100%/my")
    environ = {**ENVIRON, "SLURM_GPUS_PER_NODE": "h100:8", "SLURM_ARRAY_TASK_ID": "3"}
    options, _ = successor(newer, environ, ARGV)
    assert [word for word in options if "gpu:" in word or "gpus" in word] == ["--gpus-per-node=h100:8"]
    assert {"--gres=nic:1", "--exclusive", "--error=/100%%/my job.41.log", "--array=3"} <= set(options)
    assert "--no-requeue" not in options


@pytest.mark.parametrize(
    ("command", "argv", "expected"),
    [
        ("/s/run.sh", ["train", "a.toml"], []),
        ("/s/run.sh --a=1 2 --b", ["train", "f", "--a=1 2", "--b"], ["--a=1 2", "--b"]),
        ("/s/run.sh train f --a=x  y", ["train", "f", "--a=x  y"], ["train", "f", "--a=x  y"]),
        ("/s/run.sh --a ", ["train", "--a", ""], ["--a", ""]),
        # The script keeps its first argument to itself, and adds one at the end: then blanks separate.
        ("/s/run.sh first --a=1 2", ["train", "--a=1 2"], ["first", "--a=1 2"]),
        ("/s/run.sh --a=1 --b=2", ["train", "--a=1", "--b=2", "--c"], ["--a=1", "--b=2"]),
    ],
)
def test_words_that_the_script_passed_on_keep_their_blanks(command: str, argv: list[str], expected: list[str]) -> None:
    assert split_command(command, argv) == expected


def test_a_script_with_blanks_in_its_path(tmp_path: Path) -> None:
    script = tmp_path / "my run.sh"
    script.touch()
    assert split_command(f"{script} --a=1", ["train", "--a=1"]) == ["--a=1"]


def test_the_next_job_does_not_inherit_what_slurm_said_of_this_one() -> None:
    kept = {"PATH": "/bin", "SBATCH_ACCOUNT": "me", "SLURM_CONF": "/etc/slurm.conf"}
    gone = {"SLURM_RESTART_COUNT": "2", "SLURMD_NODENAME": "a", "CUDA_VISIBLE_DEVICES": "0"}
    assert successor_environment(kept | gone) == kept


def test_sigterm_ends_the_wait_for_slurm_and_not_the_command_before_it() -> None:
    asks_to_end = f"import os, signal; os.kill({os.getpid()}, signal.SIGTERM); os.kill(os.getpid(), signal.SIGTERM)"
    before = signal.getsignal(signal.SIGTERM)
    with termination() as stated:
        with immune():
            assert subprocess.run([sys.executable, "-c", asks_to_end], check=False).returncode == 0
        assert stated.wait(HANG_S)
    with termination() as stated:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        assert stated.wait(HANG_S)
    assert signal.getsignal(signal.SIGTERM) is before
