"""Slurm's words: lists of nodes, states of jobs, and how processes ended."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import completed
from waiting import HANG_S

from slurm_rlhf.cluster.processes import exit_text, raise_descriptors, usual_cause
from slurm_rlhf.cluster.slurm_environment import MAX_RANGE, expand, slurm_order
from slurm_rlhf.cluster.slurm_job import OVER, REASONS, STATES, Job, parse_jobs, reason_words, state_words
from slurm_rlhf.errors import ConfigError, PlacementError

VECTORS = json.loads((Path(__file__).parents[1] / "support" / "nodelist_vectors.json").read_text())


def test_committed_vectors() -> None:
    assert len(VECTORS["valid"]) > 300
    for text, names in VECTORS["valid"].items():
        assert expand(text) == names, text


@pytest.mark.parametrize("text", VECTORS["invalid"])
def test_committed_invalid_lists(text: str) -> None:
    with pytest.raises(PlacementError, match="invalid node list"):
        expand(text)


def make_bracket(rng: random.Random) -> str:
    parts = []
    for _ in range(rng.randint(1, 3)):
        low = rng.choice((0, 1, 8, 9, 98, 99, rng.randint(0, 12345), rng.randint(0, 10**9)))
        width = rng.choice((0, 1, 2, 3, 5, 9))
        high = low + rng.choice((0, 1, 2, rng.randint(0, 20)))
        padded = str(low).zfill(width)
        parts.append(padded if rng.random() < 0.3 else f"{padded}-{str(high).zfill(rng.choice((0, width)))}")
    return f"[{','.join(parts)}]"


def make_element(rng: random.Random) -> str:
    text = rng.choice(("gpu", "n", "login1", "rack-2_", "a.b.c-", "c001-", "", "0", "lrdn"))
    for index in range(rng.choice((0, 1, 1, 1, 2, 2, 3))):
        text += rng.choice(("", "-n", "x1_")) * (index > 0) + make_bracket(rng)
    return text or "x"


def make_list(rng: random.Random) -> str:
    separators = (",", ",", ",", ",,", " ", ", ")
    elements = [make_element(rng) for _ in range(rng.randint(1, 6))]
    return elements[0] + "".join(rng.choice(separators) + element for element in elements[1:])


@pytest.fixture(scope="module")
def scontrol(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment in which `scontrol show hostnames` works without a cluster."""
    if shutil.which("scontrol") is None:
        pytest.skip("scontrol is not installed: compared with the committed vectors only (Debian: slurm-client)")
    conf = tmp_path_factory.mktemp("slurm") / "slurm.conf"
    conf.write_text("ClusterName=x\nSlurmctldHost=localhost\nAuthType=auth/none\nNodeName=localhost\n")
    environ = {**os.environ, "SLURM_CONF": str(conf)}
    if hostnames("a[1-2]", environ) != ["a1", "a2"]:
        pytest.skip("scontrol does not run here, not even on a[1-2]")
    return environ


def hostnames(text: str, environ: dict[str, str]) -> list[str]:
    command = ["scontrol", "show", "hostnames", text]
    return completed(command, env=environ).stdout.split()


@pytest.mark.slow
def test_4000_lists_equal_to_scontrol(scontrol: dict[str, str]) -> None:
    rng = random.Random(7)
    for _ in range(100):
        lists = [make_list(rng) for _ in range(40)]
        joined = ",".join(lists)
        assert [name for text in lists for name in expand(text)] == hostnames(joined, scontrol), joined


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("gpu[001-003", "its elements are like"),
        ("gpu001,gpu[3-1]", r"\[3-1\] has '3-1'"),
        ("gpu[1,,2]", "has ''"),
        ("gpu[]", "its elements are like"),
        ("gpu[1-]", "has '1-'"),
        ("gpu[a-c]", "its elements are like"),
        ("gpu[1-2-3]", "has '1-2-3'"),
        ("gpu[1, 2]", "its elements are like"),
        ("gpu]1", "its elements are like"),
        ("login,g;rm", "its elements are like"),
        ("gpu[001-002].cluster.local,b", "its elements are like"),
        (f"gpu[0-{MAX_RANGE}]", f"range of up to {MAX_RANGE}"),
        ("a[0-65535][0-99]", "has more than 1048576 names"),
    ],
)
def test_errors_name_what_is_wrong(text: str, what: str) -> None:
    with pytest.raises(PlacementError, match=f"invalid node list.*{what}"):
        expand(text)


SORTED = {
    "r01c[01-03],fat-[1-2]": "fat-1 fat-2 r01c01 r01c02 r01c03",
    "n10,n9,n1,n01,n002,n100": "n1 n9 n01 n10 n002 n100",
    "a,b10,b9,b,B1,a1": "B1 a a1 b b9 b10",
    "rack10-n1,rack9-n2,rack9-n10": "rack9-n2 rack9-n10 rack10-n1",
    "x-2,x1,x": "x x1 x-2",
    "gpu1-ib,gpu10-ib,gpu2-ib": "gpu1-ib gpu2-ib gpu10-ib",
}
"""List -> what `scontrol show hostlistsorted` of Slurm 22.05 makes of it."""


@pytest.mark.parametrize("text", SORTED)
def test_nodes_of_a_job_have_slurms_order(text: str) -> None:
    assert slurm_order(expand(text)) == SORTED[text].split()


@pytest.mark.parametrize("text", SORTED)
def test_that_order_is_scontrols(scontrol: dict[str, str], text: str) -> None:
    command = ["scontrol", "show", "hostlistsorted", text]
    done = subprocess.run(command, env=scontrol, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert expand(done.stdout.strip()) == SORTED[text].split()


@pytest.mark.parametrize("text", ["", " ", ",,"])
def test_a_list_without_a_node(text: str) -> None:
    with pytest.raises(PlacementError, match="names no node"):
        expand(text)


@given(st.text(alphabet="ab01-[],. \t]é", max_size=30))
def test_any_text_gives_names_or_our_error(text: str) -> None:
    try:
        names = expand(text)
    except PlacementError:
        return
    assert names
    assert all(name and not set(name) & set("[], \t") for name in names)


# --- states -----------------------------------------------------------------------------------------------------------


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
    # A state that ends a job without the user's doing says how the run goes on.
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


# --- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "how", "cause"),
    [
        (0, "ended with status 0", ""),
        (2, "ended with status 2", ""),
        (128, "ended with status 128", ""),
        (143, "ended with status 143 (128 + SIGTERM)", ""),  # a conductor that was asked to save and leave
        (137, "ended with status 137 (128 + SIGKILL)", ""),  # a shell, or srun, tells of its child's signal
        (255, "ended with status 255", ""),
        (-15, "was killed by SIGTERM", ""),
        (
            -9,
            "was killed by SIGKILL",
            " (often: the memory of the node or the job was full; lower vllm.cpu_kvcache_gib",
        ),
        (-7, "was killed by SIGBUS", " (often: /dev/shm was full)"),
        (-35, "was killed by signal 35", ""),  # one that has no name
    ],
)
def test_the_end_of_a_process_in_words(code: int, how: str, cause: str) -> None:
    assert exit_text(code) == how
    assert usual_cause(code).startswith(cause)
    assert bool(usual_cause(code)) == bool(cause)


def test_a_process_may_open_as_many_files_as_it_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank costs the conductor two; a limit without end is one that some programs count up to."""
    for before, after in (
        ((1024, 4096), (4096, 4096)),
        ((1024, resource.RLIM_INFINITY), (65536, resource.RLIM_INFINITY)),
        ((1024, 1 << 30), (65536, 1 << 30)),
        ((100_000, 1 << 30), None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None),
    ):
        made: list[tuple[int, int]] = []
        monkeypatch.setattr(resource, "getrlimit", lambda which, before=before: before)
        monkeypatch.setattr(resource, "setrlimit", lambda which, limits, made=made: made.append(limits))
        raise_descriptors()
        assert made == ([after] if after else [])


def test_ranks_that_no_limit_has_room_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 1024))
    raise_descriptors(448)
    with pytest.raises(ConfigError, match=r"449 ranks take 1026 .*may have 1024 open, .*`ulimit -n`"):
        raise_descriptors(449)
