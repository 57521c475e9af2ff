"""Going on in another allocation: requeue this Slurm job or, where the site forbids that, submit its successor."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from slurm_rlhf.cluster.continuation import Continuation, NoContinuation
from slurm_rlhf.cluster.environment import read_slurm

_COMMAND_S = 30.0
_KILL_S = 20.0  # Slurm ends a requeued job within seconds


class SlurmContinuation:
    """Implements `cluster.continuation.Continuation` for the job this process runs in."""

    def __init__(self, job_id: int, end_time: int | None, submit_dir: str) -> None:
        self._job = str(job_id)
        self._end_time = end_time
        self._submit_dir = submit_dir

    def end_time(self) -> float | None:
        """From the environment, else from one `squeue` (Slurm before 23.02 sets no variable)."""
        if self._end_time is not None:
            return float(self._end_time)
        answer = _run(["squeue", "-h", "-j", self._job, "-o", "%e"])
        try:
            return datetime.fromisoformat(answer.stdout.strip()).timestamp()
        except ValueError:
            return None  # no limit, or the controller did not answer: the signal still comes

    def go_on(self) -> str:
        """`scontrol requeue`, else `sbatch --dependency=afterany` of the script that this job was made of."""
        requeued = _run(["scontrol", "requeue", self._job])
        if requeued.returncode == 0:
            time.sleep(_KILL_S)
            return f"job {self._job} is requeued"
        why = requeued.stderr.strip() or "scontrol requeue failed"
        script = self._script()
        if script is None:
            return f"job {self._job} could not be requeued ({why}); submit the same command to go on"
        words = ["sbatch", "--parsable", f"--dependency=afterany:{self._job}", *script]
        submitted = _run(words, cwd=self._submit_dir or None)
        if submitted.returncode == 0:
            return f"requeue is not allowed here ({why}); job {submitted.stdout.strip()} follows this one"
        return (
            f"neither requeue ({why}) nor sbatch ({submitted.stderr.strip()}) worked; submit the same command to go on"
        )

    def finished(self) -> str:
        return ""

    def _script(self) -> list[str] | None:
        """The batch script and its arguments as they were submitted; arguments with blanks in them do not survive."""
        shown = _run(["scontrol", "show", "job", "-o", self._job]).stdout
        found = re.search(r" Command=(.*?) WorkDir=", shown)
        words = found.group(1).split() if found else []
        return words if words and Path(words[0]).is_file() else None


def continuation_here(environ: Mapping[str, str]) -> Continuation:
    """What the scheduler that this process runs under offers."""
    slurm = read_slurm(environ)
    if slurm is None:
        return NoContinuation()
    return SlurmContinuation(slurm.job_id, slurm.end_time, slurm.submit_dir)


def _run(words: list[str], cwd: str | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            words, capture_output=True, text=True, timeout=_COMMAND_S, check=False, stdin=subprocess.DEVNULL, cwd=cwd
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(words, 1, "", str(error))
