"""Logs that a run quotes: the newest in which its present start has written, and nothing from before."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from slurm_rlhf.errors import system_cause
from slurm_rlhf.groups.deaths import StartLogs
from slurm_rlhf.nodes.launcher import Ended
from slurm_rlhf.observe.log_tail import FailedProcess
from slurm_rlhf.run_directory import RunDirectory

REPORT = """Root Cause (first observed failure):
  rank      : {rank} (local_rank: {rank})
  exitcode  : -9 (pid: 7)
"""


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path)
    made.make()
    write(made.role_log("actor", "n1", 0), "of a start before", 1)
    write(made.role_log("actor", "n1", "torchrun"), REPORT.format(rank=0), 1)
    return made


def write(log: Path, text: str, at: int) -> None:
    with log.open("a") as file:
        file.write(f"{text}\n")
    os.utime(log, (at, at))


def test_the_newest_log_is_quoted_and_nothing_of_an_earlier_start(directory: RunDirectory) -> None:
    logs = StartLogs(directory)
    quiet = [directory.role_log("actor", "n1", 0)]
    assert logs.quote(quiet) == f"The last lines of {quiet[0]}:\n    (it is empty)"
    write(quiet[0], "of this start", 5)
    write(directory.role_log("actor", "n1", 1), "\n".join(str(line) for line in range(20)), 4)
    assert logs.quote(logs.of_role("actor")) == f"The last lines of {quiet[0]}:\n    of this start"
    write(directory.role_log("actor", "n1", 1), "later", 6)
    *head, last = logs.quote(logs.of_role("actor")).splitlines()
    assert (len(head), last) == (12, "    later")
    logs.mark()
    assert "later" not in logs.quote(logs.of_role("actor"))


@pytest.mark.parametrize(
    ("last", "cause"),
    [
        ("MemoryError", "a process may have 2.0 GiB of address space here (`ulimit -v`, RLIMIT_AS)"),
        ("terminate called after throwing an instance of 'std::bad_alloc'", "start with `ulimit -v unlimited`"),
        ("OSError: [Errno 22] Invalid argument", "LD_PRELOAD = /lib/libfaketime.so.1 replaces calls of the system"),
        ("OSError: [Errno 5] Input/output error", ""),
    ],
)
def test_what_is_around_a_process_and_ends_it_is_named(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, last: str, cause: str
) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/lib/libfaketime.so.1")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (2 << 30, 2 << 30) if kind == resource.RLIMIT_AS else None)
    log = directory.role_log("actor", "n1", 0)
    logs = StartLogs(directory)
    write(log, last, 5)
    quoted, _, stated = logs.quote([log]).partition(f"    {last}")
    assert quoted == f"The last lines of {log}:\n"
    assert cause in stated
    assert bool(stated) == bool(cause)
    monkeypatch.undo()
    assert logs.quote([log]).endswith(last)


def test_a_gpu_that_one_process_has_to_itself_is_named() -> None:
    said = "CUDA error: CUDA-capable device(s) is/are busy or unavailable"
    assert "ask for compute mode Default" in system_cause(f"AcceleratorError: {said}")


def test_a_log_that_cannot_be_looked_at_is_said_to_be_so(directory: RunDirectory) -> None:
    """Threads that watch a run go on: a name that is too long is an error, as a hiccup of the file system is."""
    assert "cannot be read" in StartLogs(directory).quote([directory.logs / ("x" * 300)])


def test_of_a_group_that_ended_its_ranks_are_asked_before_the_role(directory: RunDirectory) -> None:
    logs = StartLogs(directory)
    end = Ended("actor", "n1", "ended", directory.logs / "actor.srun.log")
    assert logs.of_end(end)[-1] == end.log
    own = directory.role_log("actor", "n1", 0)
    write(own, "of this start", 5)
    assert logs.of_end(end) == [own]
    assert [path.name for path in logs.of_ranks("rollout", "n2", [3])] == ["rollout.n2.3.log", "rollout.n2.3.start.log"]


def test_the_report_of_a_torchrun_is_that_of_this_start(directory: RunDirectory) -> None:
    logs = StartLogs(directory)
    assert logs.first_failure("actor", "n1") is None
    write(directory.role_log("actor", "n1", "torchrun"), REPORT.format(rank=1), 5)
    assert logs.first_failure("actor", "n1") == FailedProcess(1, 7, -9)
