"""Who goes on with a run that has to stop: this job again, the next one of its chain, or submitit."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path

from slurm_rlhf.cluster.slurm_environment import SlurmEnvironment, read_slurm
from slurm_rlhf.cluster.slurm_job import command
from slurm_rlhf.cluster.stop import Continuation
from slurm_rlhf.config.schema import Slurm
from slurm_rlhf.launch.requeue import continuation_here

PARENT_GOES_ON = "SLURM_RLHF_PARENT_GOES_ON"
"""Variable with the signal that makes the parent of this process requeue the job; set by whoever is such a parent."""


def continuation_of(settings: Slurm, run_dir: Path, environ: Mapping[str, str]) -> Continuation:
    """What the scheduler offers to the run in `run_dir` with these `settings` in this environment."""
    here = continuation_here(environ, run_dir)
    if PARENT_GOES_ON in environ:
        return ParentContinuation(int(environ[PARENT_GOES_ON]), os.getppid())
    slurm = read_slurm(environ)
    return ChainContinuation(here, slurm) if settings.chain and slurm is not None else here


class ChainContinuation:
    """Implements `cluster.continuation.Continuation` for one of several jobs that go on with the same run."""

    def __init__(self, inner: Continuation, slurm: SlurmEnvironment) -> None:
        self._inner = inner
        self._slurm = slurm

    def end_time(self) -> float | None:
        return self._inner.end_time()

    def go_on(self) -> str:
        """Nothing to arrange: requeued, this job would wait behind those that were submitted with it."""
        return "the next job of the chain goes on"

    def finished(self) -> str:
        """Cancels the tasks of this array, or the jobs of this name, that still wait. One call of `scancel`."""
        array = self._slurm.array_job_id
        which = [str(array)] if array is not None else [f"--name={self._slurm.job_name}", f"--user={os.getuid()}"]
        done = command(["scancel", "--state=PENDING", *which])
        if done.returncode:
            return f"the jobs that wait to go on with this run could not be cancelled: {done.stderr.strip()}"
        return "the jobs that waited to go on with this run are cancelled"


class ParentContinuation:
    """Implements `cluster.continuation.Continuation` where the parent of this process requeues the job."""

    def __init__(self, number: int, parent: int) -> None:
        self._number = signal.Signals(number)
        self._parent = parent

    def end_time(self) -> None:
        """The parent says when the time has come."""

    def go_on(self) -> str:
        os.kill(self._parent, self._number)
        return "the job is requeued by the process that submitit started"

    def finished(self) -> str:
        return ""
