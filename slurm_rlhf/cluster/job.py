"""A job as slurmctld knows it, by one call of `scontrol`; no accounting data base is needed."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurm_rlhf.errors import RunError

_TIMEOUT_S = 30.0
_FIELD = re.compile(r"(?:^|\s)([A-Z][\w:/]*)=")
_FORGOTTEN = ("Invalid job id", "not found")


@dataclass(frozen=True, slots=True)
class Job:
    """One job or array task; what scontrol did not say is empty."""

    id: str  # 12, or 12_3 for a task of an array
    number: str  # what SLURM_JOB_ID is in it
    state: str
    reason: str
    exit_code: str  # status:signal
    restarts: str
    nodes: str
    end_time: str  # 2026-11-20T18:00:00, Unknown
    output: str  # of its batch script


def parse_jobs(text: str) -> list[Job]:
    """The jobs in the output of `scontrol show job -o`."""
    jobs = []
    for line in text.splitlines():
        marks = list(_FIELD.finditer(line))
        ends = [*(mark.start() for mark in marks), len(line)][1:]
        fields = {mark[1]: line[mark.end() : end].strip() for mark, end in zip(marks, ends, strict=True)}
        if "JobId" not in fields:
            continue
        task = fields.get("ArrayTaskId", "")
        jobs.append(
            Job(
                f"{fields['ArrayJobId']}_{task}" if task else fields["JobId"],
                fields["JobId"],
                *(fields.get(name, "") for name in ("JobState", "Reason", "ExitCode", "Restarts", "NodeList")),
                *(fields.get(name, "") for name in ("EndTime", "StdOut")),
            )
        )
    return jobs


def ask_jobs(job_id: str) -> list[Job]:
    """The job `job_id`, or all tasks of that array; empty when slurmctld has forgotten it. Blocks for up to 30 s.

    Raises RunError where slurmctld does not answer.
    """
    done = command(["scontrol", "show", "job", "-o", job_id])
    if done.returncode == 0:
        return parse_jobs(done.stdout)
    if any(mark in done.stderr for mark in _FORGOTTEN):
        return []
    raise RunError(
        f"slurmctld says nothing about job {job_id}: {done.stderr.strip()}; ask again in a minute, on a node that can "
        "submit jobs"
    )


def command(
    words: Sequence[str], env: Mapping[str, str] | None = None, cwd: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands; a missing or hanging one is a failed one. Blocks for up to 30 s.

    `cwd`: where to run it, if there is such a directory.
    """
    try:
        return subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
            env=env,
            cwd=cwd if os.path.isdir(cwd) else None,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(list(words), 1, "", str(error))
