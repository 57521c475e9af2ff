"""Continue a run in another allocation: requeue this job, submit its successor, or leave it to a chain or submitit."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from slurm_rlhf.cluster.slurm_environment import SlurmEnvironment, read_slurm
from slurm_rlhf.cluster.slurm_job import command
from slurm_rlhf.cluster.stop import Continuation, NoContinuation, immune, termination
from slurm_rlhf.config.schema import Slurm
from slurm_rlhf.launch.successor import successor, successor_environment

_KILL_S = 20.0  # Slurm ends a requeued job within seconds
SCRIPT = "successor.sh"
"""In `.control` of the run directory."""

PARENT_REQUEUES = "SLURM_RLHF_PARENT_REQUEUES"
"""Variable that such a parent sets: the signal that makes the parent of this process requeue the job."""


class SlurmContinuation:
    """Requeue the job of this process, or submit its successor; implements `cluster.stop.Continuation`."""

    def __init__(
        self, slurm: SlurmEnvironment, environ: Mapping[str, str], argv: Sequence[str], directory: Path
    ) -> None:
        """`argv`: the words this program was started with. `directory`: for a copy of the batch script, if needed."""
        self._job = str(slurm.job_id)
        self._slurm = slurm
        self._environ = environ
        self._argv = argv
        self._directory = directory

    def end_time(self) -> float | None:
        """Read the end from the environment, else ask `squeue` once (Slurm before 23.02 sets no variable)."""
        if self._slurm.end_time is not None:
            return float(self._slurm.end_time)
        answer = command(["squeue", "-h", "-j", self._job, "-o", "%e"])
        try:
            return datetime.fromisoformat(answer.stdout.strip()).timestamp()
        except ValueError:
            return None  # no limit, or the controller did not answer: the signal still comes

    def go_on(self) -> str:
        """Run `scontrol requeue`, else `sbatch --dependency=afterany`. Only the main thread may call it.

        Slurm ends a requeued job at once, beginning with SIGTERM, and its nodes are blocked until its processes have
        ended: this waits for that SIGTERM and no longer.
        """
        with termination() as terminated:
            with immune():
                requeued = command(["scontrol", "requeue", self._job])
            if requeued.returncode == 0:
                terminated.wait(_KILL_S)
                return f"job {self._job} is requeued"
        return self._submit(requeued.stderr.strip() or "scontrol requeue failed")

    def _submit(self, why: str) -> str:
        shown = command(["scontrol", "show", "job", self._job])
        written = command(["scontrol", "write", "batch_script", self._job, "-"])
        if shown.returncode or written.returncode or not written.stdout.startswith("#!"):
            return f"job {self._job} could not be requeued ({why}); submit the same command to go on"
        job = successor(shown.stdout, self._environ, self._argv)
        script = self._script(job.script, written.stdout)
        submitted = command(
            ["sbatch", "--parsable", f"--dependency=afterany:{self._job}", *job.options, script, *job.arguments],
            env=successor_environment(self._environ),
            cwd=self._slurm.submit_dir,  # SLURM_SUBMIT_DIR of the next job: scripts find their files by it
        )
        if submitted.returncode == 0:
            return f"requeue is not allowed here ({why}); job {submitted.stdout.strip()} follows this one"
        return (
            f"neither requeue ({why}) nor sbatch ({submitted.stderr.strip()}) worked; submit the same command to go on"
        )

    def finished(self) -> str:
        return ""

    def _script(self, path: str, text: str) -> str:
        """Return `path` if it still is the script of this job, else a copy of what Slurm has kept."""
        try:
            if Path(path).read_text(encoding="utf-8").strip() == text.strip():
                return path
        except (OSError, ValueError):
            pass
        copy = self._directory / SCRIPT
        copy.write_text(text, encoding="utf-8")
        return str(copy)


class ChainContinuation:
    """Leave the rest to the next job of a chain; implements `cluster.stop.Continuation`."""

    def __init__(self, inner: Continuation, slurm: SlurmEnvironment) -> None:
        self._inner = inner
        self._slurm = slurm

    def end_time(self) -> float | None:
        return self._inner.end_time()

    def go_on(self) -> str:
        """Arrange nothing: requeued, this job would wait behind those that were submitted with it."""
        return "the next job of the chain goes on"

    def finished(self) -> str:
        """Cancel the tasks of this array, or the jobs of this name, that still wait, with one call of `scancel`."""
        array = self._slurm.array_job_id
        which = [str(array)] if array is not None else [f"--name={self._slurm.job_name}", f"--user={os.getuid()}"]
        done = command(["scancel", "--state=PENDING", *which])
        if done.returncode:
            return f"the jobs that wait to go on with this run could not be cancelled: {done.stderr.strip()}"
        return "the jobs that waited to go on with this run are cancelled"


class ParentContinuation:
    """Let the parent of this process requeue the job; implements `cluster.stop.Continuation`."""

    def __init__(self, number: int, parent: int) -> None:
        self._number = signal.Signals(number)
        self._parent = parent

    def end_time(self) -> None:
        """Return None: the parent says when the time has come."""

    def go_on(self) -> str:
        os.kill(self._parent, self._number)
        return "the job is requeued by the process that submitit started"

    def finished(self) -> str:
        return ""


def continuation_of(settings: Slurm, run_dir: Path, environ: Mapping[str, str]) -> Continuation:
    """Choose how the run in `run_dir` continues with these `settings` in this environment."""
    if PARENT_REQUEUES in environ:
        return ParentContinuation(int(environ[PARENT_REQUEUES]), os.getppid())
    slurm = read_slurm(environ)
    if slurm is None:
        return NoContinuation()
    here = SlurmContinuation(slurm, environ, sys.argv[1:], run_dir / ".control")
    return ChainContinuation(here, slurm) if settings.chain else here
