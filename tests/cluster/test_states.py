"""Slurm's states and reasons: all of them, in words; and jobs as scontrol prints them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slurm_rlhf.cluster.slurm_job import OVER, REASONS, STATES, Job, parse_jobs, reason_words, state_words

# `man squeue` and `man sacct` of Slurm 22.05 to 25.05, section JOB STATE CODES.
BASE = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PENDING"),
    *("PREEMPTED", "RUNNING", "SUSPENDED", "TIMEOUT"),
}
FLAGS = {
    *("COMPLETING", "CONFIGURING", "EXPEDITING", "LAUNCH_FAILED", "POWER_UP_NODE", "RECONFIG_FAIL", "REQUEUED"),
    *("REQUEUE_FED", "REQUEUE_HOLD", "RESIZING", "REVOKED", "SIGNALING", "SPECIAL_EXIT", "STAGE_OUT", "STOPPED"),
    "UPDATE_DB",
}
ARRAY = (
    "JobId=13 ArrayJobId=12 ArrayTaskId=1 ArrayTaskThrottle=1 JobName=ppo_7b UserId=me(1) JobState=RUNNING Reason=None "
    "Dependency=(null) Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=0:0 RunTime=00:01:02 TimeLimit=01:00:00 "
    "EndTime=2026-11-20T18:00:00 NodeList=gpu[001-002] BatchHost=gpu001 Command=/home/me/a b.sh --train.seed=1 "
    "WorkDir=/home/me StdErr=/home/me/ppo_7b.log StdIn=/dev/null StdOut=/home/me/ppo_7b.log Power= \n"
    "JobId=12 ArrayJobId=12 ArrayTaskId=2-10%1 JobName=ppo_7b JobState=PENDING Reason=JobArrayTaskLimit Restarts=0 "
    "ExitCode=0:0 EndTime=Unknown NodeList=(null) StdOut=/home/me/ppo_7b.log\n"
)


def test_every_state_of_slurm_is_named_with_what_it_means() -> None:
    assert set(STATES) == BASE | FLAGS
    assert {name for name, (what, _) in STATES.items() if not what} == set()
    assert {*BASE, "REVOKED"} > OVER
    # What ends a job without the user's doing says how it goes on.
    for name in OVER - {"COMPLETED"}:
        assert STATES[name][1]


def test_states_of_this_machines_slurm_are_among_them() -> None:
    library = next(Path("/usr/lib").glob("*/slurm-wlm/libslurmfull.so"), None)
    if library is None:
        pytest.skip("needs Slurm: no libslurmfull.so")
    text = library.read_bytes()
    # Spelled as Slurm prints them; which flags there are differs from version to version.
    flags = {"COMPLETING", "CONFIGURING", "REQUEUED", "SPECIAL_EXIT", "SIGNALING", "STAGE_OUT"}
    assert [name for name in BASE | flags if name.encode() + b"\0" not in text] == []


def test_several_states_and_unknown_ones() -> None:
    assert state_words("RUNNING,COMPLETING")[0] == "runs and " + STATES["COMPLETING"][0]
    assert state_words("ENTANGLED") == ("is in state ENTANGLED", "")


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("None", ""),
        ("Priority", "Priority: other jobs come first"),
        ("AssocGrpGRES", "AssocGrpGRES: a limit of your account or QOS is reached"),
        ("QOSMaxJobsPerUserLimit", "QOSMaxJobsPerUserLimit: a limit of your account or QOS is reached"),
        ("ReqNodeNotAvail, UnavailableNodes:gpu7", f"ReqNodeNotAvail: {REASONS['ReqNodeNotAvail']}"),
        ("launch_failed_requeued_held", f"launch failed requeued held: {REASONS['launch failed requeued held']}"),
        ("Mystery", "Mystery"),
    ],
)
def test_reasons(reason: str, words: str) -> None:
    assert reason_words(reason) == words


def test_jobs_as_scontrol_prints_them() -> None:
    first, rest = parse_jobs(ARRAY)
    end = "2026-11-20T18:00:00"
    output = "/home/me/ppo_7b.log"
    known = ("12_1", "13", "RUNNING", "None", "0:0", "2", "gpu[001-002]", end, output)
    assert first == Job(*known, batch_host="gpu001", requeue="1")
    assert not first.is_headless
    assert replace(first, nodes="gpu002").is_headless
    assert (rest.id, rest.state, rest.reason) == ("12_2-10%1", "PENDING", "JobArrayTaskLimit")
    assert parse_jobs("slurm_load_jobs error: Invalid job id specified\n") == []
