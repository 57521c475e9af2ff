"""Find the run that RUN names in `status` and `cancel`: a run directory or the number of a job."""

from __future__ import annotations

import fcntl
import re
from dataclasses import dataclass
from pathlib import Path

from slurm_rlhf.cluster.processes import SESSION_FILE, Session, read_session
from slurm_rlhf.cluster.slurm_job import Job, ask_jobs
from slurm_rlhf.errors import ConfigError, RunError

_JOB = re.compile(r"\d+(_\d+)?")
_ANNOUNCED = re.compile(r"run directory (/.*?)(?:, \d+ steps|;|$)", re.MULTILINE)
_READ = 1 << 20


@dataclass(frozen=True, slots=True)
class Found:
    """Describe a run: its directory and its session if they are known, and its job if slurmctld knows one."""

    directory: Path | None
    session: Session | None
    job: Job | None
    job_id: str  # empty outside Slurm
    others: tuple[Job, ...] = ()  # tasks of the same array
    unasked: str = ""  # why slurmctld could not be asked

    @property
    def alive(self) -> bool:
        """Tell whether a conductor holds the lock of the directory."""
        return self.directory is not None and _locked(self.directory / ".control" / "lock")


def find(word: str) -> Found:
    """Find the run that `word` names, with at most one call of `scontrol`.

    Raises ConfigError when it names none, RunError if slurmctld does not answer about a job.
    """
    if _JOB.fullmatch(word) and not Path(word).exists():
        return _by_job(word)
    directory = Path(word).expanduser().absolute()
    session = read_session(directory)
    if session is None and not (directory / "config.toml").exists():
        raise ConfigError(
            f"{word} is neither the number of a job nor the directory of a run (there is no {word}/{SESSION_FILE}): "
            "give the run_dir of the configuration, or the number that squeue --me shows"
        )
    number = (session.task or session.job_id) if session else ""
    try:
        jobs = ask_jobs(number) if number else []
    except RunError as error:
        return Found(directory, session, None, number, unasked=str(error))
    return Found(directory, session, _current(jobs, number), number)


def _by_job(word: str) -> Found:
    jobs = ask_jobs(word)
    if not jobs:
        raise ConfigError(
            f"slurmctld knows no job {word}: it forgets a job some minutes after its end (MinJobAge). Give the run "
            "directory instead: its files stay"
        )
    job = _current(jobs, word)
    assert job is not None
    directory = _announced_directory(job)
    session = read_session(directory) if directory else None
    return Found(directory, session, job, job.number, tuple(other for other in jobs if other is not job))


def _current(jobs: list[Job], number: str) -> Job | None:
    """Choose the job itself; of an array the task that runs, else the first one."""
    named = [job for job in jobs if number in (job.number, job.id)]
    running = [job for job in jobs if job.state == "RUNNING"]
    array = [job for job in named if not job.id.startswith(f"{number}_")]
    return next(iter([*array, *running, *jobs]), None)


def _announced_directory(job: Job) -> Path | None:
    """Find the run directory, which the run prints into the output of the job when it starts."""
    try:
        with open(job.output, encoding="utf-8", errors="replace") as file:
            found = _ANNOUNCED.findall(file.read(_READ))
    except OSError:
        return None
    return Path(found[-1]) if found else None


def _locked(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
