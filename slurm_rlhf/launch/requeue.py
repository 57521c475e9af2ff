"""Going on in another allocation: requeue this Slurm job or, where the site forbids that, submit its successor."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from slurm_rlhf.cluster.slurm_environment import SlurmEnvironment, read_slurm
from slurm_rlhf.cluster.slurm_job import command
from slurm_rlhf.cluster.stop import Continuation, NoContinuation, immune, termination
from slurm_rlhf.launch.successor import successor, successor_environment

_KILL_S = 20.0  # Slurm ends a requeued job within seconds
SCRIPT = "successor.sh"
"""In the run directory's `.control`."""


class SlurmContinuation:
    """Implements `cluster.continuation.Continuation` for the job this process runs in."""

    def __init__(
        self, slurm: SlurmEnvironment, environ: Mapping[str, str], argv: Sequence[str], directory: Path
    ) -> None:
        """`argv`: the words this program was started with. `directory` takes a copy of the batch script if need be."""
        self._job = str(slurm.job_id)
        self._slurm = slurm
        self._environ = environ
        self._argv = argv
        self._directory = directory

    def end_time(self) -> float | None:
        """From the environment, else from one `squeue` (Slurm before 23.02 sets no variable)."""
        if self._slurm.end_time is not None:
            return float(self._slurm.end_time)
        answer = command(["squeue", "-h", "-j", self._job, "-o", "%e"])
        try:
            return datetime.fromisoformat(answer.stdout.strip()).timestamp()
        except ValueError:
            return None  # no limit, or the controller did not answer: the signal still comes

    def go_on(self) -> str:
        """`scontrol requeue`, else `sbatch --dependency=afterany`. Only the main thread may call it.

        Slurm ends a requeued job at once, and until its processes are gone the nodes are not free for others: the
        SIGTERM by which it begins ends the wait here.
        """
        with termination() as told:
            with immune():
                requeued = command(["scontrol", "requeue", self._job])
            if requeued.returncode == 0:
                told.wait(_KILL_S)
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
        """`path` if it still is the script of this job, else a copy of what Slurm has kept."""
        try:
            if Path(path).read_text(encoding="utf-8").strip() == text.strip():
                return path
        except (OSError, ValueError):
            pass
        copy = self._directory / SCRIPT
        copy.write_text(text, encoding="utf-8")
        return str(copy)


def continuation_here(environ: Mapping[str, str], run_dir: Path) -> Continuation:
    """What the scheduler that this process runs under offers."""
    slurm = read_slurm(environ)
    if slurm is None:
        return NoContinuation()
    return SlurmContinuation(slurm, environ, sys.argv[1:], run_dir / ".control")
