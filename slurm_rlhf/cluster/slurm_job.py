"""Ask Slurm for a job: its fields, what its state means for a run, why it waits, and the GPUs it was granted.

Uses `scontrol`, which needs no accounting data base. `slurm.toml` has the words for states and reasons.
"""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_rlhf.cluster.slurm_environment import expand, parse_gpus
from slurm_rlhf.errors import PlacementError, RunError
from slurm_rlhf.wire import timeouts

_FIELD = re.compile(r"(?:^|\s)([A-Z][\w:/]*)=")
_FIELDS = (
    *("JobState", "Reason", "ExitCode", "Restarts", "NodeList", "EndTime", "StdOut"),
    *("Partition", "StartTime", "BatchHost", "Requeue"),
)
"""Fields of scontrol, in the order of `Job` from `state` on."""
_FORGOTTEN = ("Invalid job id", "not found")  # in errors of scontrol about a job that slurmctld does not know any more


@dataclass(frozen=True, slots=True)
class Job:
    """Describe a job or a task of an array; fields that scontrol does not print are empty."""

    id: str  # 12, or 12_3 for a task of an array
    number: str  # SLURM_JOB_ID inside the job
    state: str
    reason: str
    exit_code: str  # status:signal
    restarts: str
    nodes: str
    end_time: str  # 2026-11-20T18:00:00, Unknown
    output: str  # file with the output of its batch script
    partition: str = ""  # several with commas
    start_time: str = ""  # when Slurm expects to start a waiting job, or Unknown
    batch_host: str = ""  # where its batch script runs
    requeue: str = ""  # 0: it must not be requeued

    @property
    def is_headless(self) -> bool:
        """Tell whether it runs without the node of its batch script, which --no-kill allows: it has no conductor."""
        try:
            return self.state == "RUNNING" and bool(self.batch_host) and self.batch_host not in expand(self.nodes)
        except PlacementError:
            return False


def parse_jobs(text: str) -> list[Job]:
    """Parse the jobs in the output of `scontrol show job -o`."""
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
                *(fields.get(name, "") for name in _FIELDS),
            )
        )
    return jobs


def ask_jobs(job_id: str, timeout_s: float = timeouts.SLURM_S) -> list[Job]:
    """Ask for the job `job_id`, or for all tasks of that array; empty if slurmctld has forgotten it.

    Raises RunError if slurmctld does not answer within `timeout_s`.
    """
    done = command(["scontrol", "show", "job", "-o", job_id], timeout_s=timeout_s)
    if done.returncode == 0:
        return parse_jobs(done.stdout)
    if any(mark in done.stderr for mark in _FORGOTTEN):
        return []
    raise RunError(
        f"slurmctld says nothing about job {job_id}: {done.stderr.strip()}; ask again in a minute, on a node that can "
        "submit jobs"
    )


def place_in_queue(job: Job, timeout_s: float = timeouts.SLURM_S) -> tuple[int, int] | None:
    """Return the place of a job among those that wait in its partition, from 1 by priority, and how many wait.

    None if Slurm does not tell: it may hide the jobs of others (PrivateData), or not answer in time.
    """
    if not job.partition:
        return None
    words = ["squeue", "-h", "-t", "PENDING", "-p", job.partition, "-S", "-p,i", "-o", "%F"]
    waiting = list(dict.fromkeys(command(words, timeout_s=timeout_s).stdout.split()))
    own = job.id.partition("_")[0]
    return (waiting.index(own) + 1, len(waiting)) if own in waiting else None


def command(
    words: Sequence[str], env: Mapping[str, str] | None = None, cwd: str = "", timeout_s: float = timeouts.SLURM_S
) -> subprocess.CompletedProcess[str]:
    """Run a command of the cluster. One that is missing or does not end within `timeout_s` counts as failed.

    `cwd` is the directory to run it in, if that exists.
    """
    try:
        return subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
            env=env,
            cwd=cwd if os.path.isdir(cwd) else None,
        )
    except subprocess.TimeoutExpired:
        said = f"{words[0]} had no answer within {timeout_s:g} s"
        return subprocess.CompletedProcess(list(words), 1, "", said)
    except OSError as error:
        return subprocess.CompletedProcess(list(words), 1, "", str(error))


_TABLES = tomllib.loads(Path(__file__).with_name("slurm.toml").read_text(encoding="utf-8"))

STATES: dict[str, tuple[str, str]] = {
    name: (what, todo.format_map(_TABLES["words"])) for name, (what, todo) in _TABLES["states"].items()
}
"""State -> (its meaning, what to do; empty: nothing), from `slurm.toml`."""

OVER = frozenset(
    {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "DEADLINE"}
    | {"PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "REVOKED"}
)
"""States of a job that will not start again by itself."""

REASONS: dict[str, str] = _TABLES["reasons"]
"""Reason why a job is pending -> explanation."""


def state_words(job_state: str) -> tuple[str, str]:
    """Explain a JobState, which may be several states with commas, and what to do."""
    known = [STATES.get(name, (f"is in state {name}", "")) for name in job_state.split(",")]
    return " and ".join(what for what, _ in known), " ".join(todo for _, todo in known if todo)


def reason_words(reason: str) -> str:
    """Explain the reason of a pending job; empty if there is none."""
    name = reason.replace("_", " ") if reason.replace("_", " ") in REASONS else reason.split(",", maxsplit=1)[0]
    if name in ("", "None"):
        return ""
    if name.startswith(("Assoc", "QOS")):
        return f"{name}: a limit of your account or QOS is reached"
    return f"{name}: {REASONS[name]}" if name in REASONS else name


_NODES = re.compile(r"\bNodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(\S*)")
_ASKED = re.compile(r"\bTresPerNode=(\S+)")


def parse_job_details(text: str) -> dict[str, int]:
    """Return the number of GPUs on each node, from `scontrol show job --details`. Raises ValueError.

    A job that is alone on its nodes (--exclusive) has all of their GPUs, but its steps get no more on a node than
    --gres or --gpus-per-node requested.
    """
    asked = _ASKED.search(text)
    most = parse_gpus(asked[1]) if asked else None
    granted = [(node, gres) for nodes, gres in _NODES.findall(text) for node in expand(nodes)]
    gpus = {node: parse_gpus(gres) if gres not in ("", "(null)") else 0 for node, gres in granted}
    return {node: min(count, most) if most else count for node, count in gpus.items()}


def ask_scontrol(job_id: int, nodes: Sequence[str]) -> tuple[int, ...]:
    """Return how many GPUs job `job_id` has on each of `nodes`. Blocks for up to 30 s.

    Raises PlacementError if Slurm does not answer, or does not describe one of the nodes.
    """
    answer = command(["scontrol", "show", "job", "--details", str(job_id)])
    problem = answer.stderr.strip() or f"exit code {answer.returncode}"
    try:
        if answer.returncode == 0:
            granted = parse_job_details(answer.stdout)
            missing = [node for node in nodes if node not in granted]
            if not missing:
                return tuple(granted[node] for node in nodes)
            problem = f"it does not list the GPUs of node {missing[0]}"
    except (ValueError, PlacementError) as error:
        problem = str(error)
    raise PlacementError(
        f"cannot tell how many GPUs job {job_id} has on each node: its environment does not tell, and `scontrol show "
        f"job --details {job_id}` failed ({problem}): request the GPUs with --gpus-per-node"
    )
