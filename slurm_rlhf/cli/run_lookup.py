"""RUN, the argument of `status` and `cancel`: a run directory or the number of a job."""

from __future__ import annotations

import fcntl
import re
from dataclasses import dataclass
from pathlib import Path

from slurm_rlhf.cluster.job import Job, ask_jobs
from slurm_rlhf.cluster.session import SESSION_FILE, Session, read_session
from slurm_rlhf.errors import ConfigError, RunError

_JOB = re.compile(r"\d+(_\d+)?")
_TOLD = re.compile(r"run directory (/.*?)(?:, \d+ steps|;|$)", re.MULTILINE)
_READ = 1 << 20


@dataclass(frozen=True, slots=True)
class Found:
    """A run: its directory and its session, as far as they are known, and its job if slurmctld knows one."""

    directory: Path | None
    session: Session | None
    job: Job | None
    job_id: str  # empty outside Slurm
    others: tuple[Job, ...] = ()  # tasks of the same array
    unasked: str = ""  # why slurmctld could not be asked

    @property
    def alive(self) -> bool:
        """True where a conductor holds the directory's lock."""
        return self.directory is not None and _locked(self.directory / ".control" / "lock")


def find(word: str) -> Found:
    """The run that `word` names, by at most one call of `scontrol`.

    Raises ConfigError when it names none, RunError where slurmctld does not answer about a job.
    """
    if _JOB.fullmatch(word) and not Path(word).exists():
        return _by_job(word)
    directory = Path(word).expanduser().absolute()
    session = read_session(directory)
    if session is None and not (directory / "config.toml").exists():
        raise ConfigError(
            f"{word} is neither the number of a job nor the directory of a run (it has no {SESSION_FILE}): name the "
            "run_dir, or the number that squeue --me shows"
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
            f"slurmctld knows no job {word}: it forgets a job some minutes after its end (MinJobAge). Name the run's "
            "directory instead: what is there stays"
        )
    job = _current(jobs, word)
    assert job is not None
    directory = _told_directory(job)
    session = read_session(directory) if directory else None
    return Found(directory, session, job, job.number, tuple(other for other in jobs if other is not job))


def _current(jobs: list[Job], number: str) -> Job | None:
    """The job itself; of an array the task that runs, else the first one."""
    named = [job for job in jobs if number in (job.number, job.id)]
    running = [job for job in jobs if job.state == "RUNNING"]
    array = [job for job in named if not job.id.startswith(f"{number}_")]
    return next(iter([*array, *running, *jobs]), None)


def _told_directory(job: Job) -> Path | None:
    """The run directory, which the run names at its start in the job's output."""
    try:
        with open(job.output, encoding="utf-8", errors="replace") as file:
            told = _TOLD.findall(file.read(_READ))
    except OSError:
        return None
    return Path(told[-1]) if told else None


def _locked(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
