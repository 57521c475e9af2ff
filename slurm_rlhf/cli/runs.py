"""Find a run by its directory or job number; end it (`slurm-rlhf cancel`), write its page (`slurm-rlhf report`)."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

from slurm_rlhf.cli.commands import Arguments
from slurm_rlhf.cluster.processes import SESSION_FILE, Session, read_session
from slurm_rlhf.cluster.slurm_job import OVER, Job, ask_jobs, command
from slurm_rlhf.cluster.stop import STOP_FILE
from slurm_rlhf.config.pipeline import EVALUATED, Pipeline
from slurm_rlhf.errors import ConfigError, RunError
from slurm_rlhf.run_directory import RunDirectory
from slurm_rlhf.wire import timeouts

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
    others: tuple[Job, ...] = ()  # other tasks of the same array
    unasked: str = ""  # why slurmctld could not be asked

    @property
    def alive(self) -> bool:
        """Tell whether a conductor holds the lock of the directory."""
        return self.directory is not None and _locked(RunDirectory(self.directory).lock)


def find(word: str) -> Found:
    """Find the run that `word` names, with at most one call of `scontrol`.

    Raises ConfigError if it names none, RunError if slurmctld does not answer about a job.
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
        jobs = ask_jobs(number, timeouts.SLURM_STATUS_S) if number else []
    except RunError as error:
        return Found(directory, session, None, number, unasked=str(error))
    return Found(directory, session, _current(jobs, number), number)


def _by_job(word: str) -> Found:
    jobs = ask_jobs(word)
    job = _current(jobs, word)
    if job is None:
        raise ConfigError(
            f"slurmctld knows no job {word}: it forgets a job some minutes after its end (MinJobAge). Give the run "
            "directory instead: its files stay"
        )
    directory = _announced_directory(job)
    session = read_session(directory) if directory else None
    return Found(directory, session, job, job.number, tuple(other for other in jobs if other is not job))


def _current(jobs: list[Job], number: str) -> Job | None:
    """Choose the job with this number; of an array the task that runs, else its first task."""
    named = [job for job in jobs if number in (job.number, job.id) and not job.id.startswith(f"{number}_")]
    running = [job for job in jobs if job.state == "RUNNING"]
    return next(iter([*named, *running, *jobs]), None)


def _announced_directory(job: Job) -> Path | None:
    """Find the run directory in the output of the job: a run prints it when it starts."""
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


def cancel(arguments: Arguments) -> int:
    """Cancel the run and say so. Raises ConfigError if RUN names no run, RunError if it cannot be cancelled."""
    word = arguments.one_word("run directory or job number")
    found = find(word)
    print(_save_first(found) if "save_first" in arguments.options else _cancel(found, word))
    return 0


def _save_first(found: Found) -> str:
    if found.directory is None:
        raise ConfigError(
            f"the directory of job {found.job_id} is not known yet: give the run directory, or leave out --save_first"
        )
    # If slurmctld could not be asked, the run may go on; a stop file that nobody reads does no harm.
    if not found.unasked and not (found.job.state not in OVER if found.job else found.alive):
        return _nothing(found)
    (found.directory / STOP_FILE).touch()
    return f"{found.directory} will save and end; `slurm-rlhf status {found.directory}` shows when it has"


def _cancel(found: Found, word: str) -> str:
    if found.unasked:
        raise RunError(found.unasked)
    if found.job_id:
        if found.job is None or (found.job.state in OVER and all(other.state in OVER for other in found.others)):
            return _nothing(found)
        # The number of an array cancels all of its tasks, those that wait included.
        target = word if word == found.job.id.partition("_")[0] else found.job.id
        done = command(["scancel", target])
        if done.returncode:
            raise RunError(f"scancel {target}: {done.stderr.strip()}. `touch RUN_DIR/stop` works for other users' runs")
        return f"job {target} is cancelled"
    session = found.session
    if session is None or not found.alive:
        return _nothing(found)
    if session.host != socket.gethostname():
        raise RunError(f"the run is process {session.pid} on {session.host}: cancel it there, or with --save_first")
    os.kill(session.pid, signal.SIGTERM)
    return f"process {session.pid} will save and end"


def _nothing(found: Found) -> str:
    return f"nothing to cancel: {f'job {found.job_id}' if found.job_id else found.directory} is over"


def report(arguments: Arguments) -> int:
    """Write the page and print where it is. Raises ConfigError if a RUN names no run."""
    if not arguments.words:
        raise arguments.error("report takes run directories or job numbers")
    from slurm_rlhf.cli.pipeline import pipeline_of

    pipelines = {name: pipeline_of(Path(name).expanduser()) for name in arguments.words}
    directories = [one for name, whole in pipelines.items() for one in _of_pipeline(whole) or [_directory(name)]]
    from slurm_rlhf.report.page import write_page

    usual = directories[0].report if len(directories) == 1 else "report.html"
    output = Path(arguments.options.get("output", usual)).expanduser().absolute()
    if not output.parent.is_dir():
        raise ConfigError(f"--output={output}: there is no directory {output.parent}")
    write_page(output, directories)
    print(f"{output} ({output.stat().st_size / 1e6:.1f} MB): open it in a browser, here or after scp")
    return 0


def _of_pipeline(whole: Pipeline | None) -> list[RunDirectory]:
    """List the directories of the stages of a pipeline that have begun."""
    stages = [RunDirectory(stage.record) for stage in whole.stages] if whole else []
    return [stage for stage in stages if stage.metrics.exists() or (stage.root / EVALUATED).exists()]


def _directory(name: str) -> RunDirectory:
    found = find(name)
    if found.directory is None:
        raise ConfigError(f"the directory of job {name} is not known: give the run directory instead")
    return RunDirectory(found.directory)
