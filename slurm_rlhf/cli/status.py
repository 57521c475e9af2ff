"""Run `slurm-rlhf status RUN`: find a run, show its job, progress and last lines of what failed.

RUN is a run directory or the number of a job, here and in `cancel`.
"""

from __future__ import annotations

import fcntl
import re
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from slurm_rlhf.cli.main import Command
from slurm_rlhf.cli.watch import INTERVAL_S, extra_lines, repeated, rows_of, show
from slurm_rlhf.cluster.processes import CONDUCTOR_GONE, SESSION_FILE, Session, attach_line, read_session
from slurm_rlhf.cluster.slurm_job import OVER, Job, ask_jobs, place_in_queue, reason_words, state_words
from slurm_rlhf.errors import ConfigError, RunError, printable, shortened
from slurm_rlhf.nodes.orphan import last_words
from slurm_rlhf.observe.events import engines_lost, read_events
from slurm_rlhf.observe.log_tail import ends_in_error, tail
from slurm_rlhf.observe.progress import duration
from slurm_rlhf.observe.run_status import RunStatus, read_run_status
from slurm_rlhf.run_directory import RunDirectory
from slurm_rlhf.wire import timeouts

_JOB = re.compile(r"\d+(_\d+)?")
_RANK_LOG = re.compile(r"(?!conductor\.)[a-z]+\.(?P<node>.+)\.\d+\.log")
_LEFT = re.compile(rf"^{CONDUCTOR_GONE}: |: the conductor at \S+ is lost: ")
"""In the last line of a rank that has left: its I/O thread ends it, or its main thread sees it first."""
_LEFT_LINES = 80
"""Of a rank's log: a traceback of a step is longer than what is shown."""
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
        jobs = ask_jobs(number, timeouts.SLURM_STATUS_S) if number else []
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


USAGE = "usage: slurm-rlhf status RUN [--watch]"
WIDTH = 12
LINES = 12


def run(words: list[str]) -> int:
    """Print the status. Raises ConfigError when RUN names no run, RunError if slurmctld does not answer."""
    named = [word for word in words if word != "--watch"]
    if len(named) != 1 or named[0].startswith("-"):
        raise ConfigError(f"status takes one run directory or job number\n{USAGE}")
    if len(named) < len(words):
        show(repeated(lambda: watched(named[0]), INTERVAL_S))
        return 0
    found = find(named[0])
    run_status = _status_of(found)
    lines = [*job_lines(found), *run_lines(found, run_status, time.time()), *failure_lines(found, run_status)]
    print(printable("\n".join(lines)))
    return 0


def watched(word: str) -> tuple[list[str], bool]:
    """Return the status with the curves of the run, and whether the run is over."""
    found = find(word)
    run_status = _status_of(found)
    more = extra_lines(rows_of(found.directory), _row) if found.directory else []
    shown = [*job_lines(found), *run_lines(found, run_status, time.time()), *more, *failure_lines(found, run_status)]
    over = run_status is not None and (run_status.status not in ("", "running") or _cut_off(found, run_status))
    return shown, over


def _status_of(found: Found) -> RunStatus | None:
    if found.directory is None:
        return None
    return read_run_status(found.directory / "metrics.jsonl", found.directory / "summary.json")


def job_lines(found: Found) -> list[str]:
    """Describe the job: its state, what that means, what to do, how to look inside."""
    job = found.job
    if found.unasked:
        return [_row("job", f"{found.job_id}: {found.unasked}")]
    if job is None:
        if not found.job_id:
            where = f" on {found.session.host}, process {found.session.pid}" if found.session else ""
            return [_row("job", f"none: started without Slurm{where}")]
        return [_row("job", f"{found.job_id}: slurmctld has forgotten it (MinJobAge), so it is over")]
    what, todo = state_words(job.state)
    where = f" on {job.nodes}" if job.nodes not in ("", "(null)") else ""
    lines = [_row("job", f"{job.id}{where}: {job.state}: it {what}{_exit(job)}")]
    if job.state == "PENDING" and (why := reason_words(job.reason)):
        lines.append(_row("", why))
    if job.state == "PENDING":
        lines += queue_lines(job, place_in_queue(job, timeouts.SLURM_STATUS_S))
    if job.restarts not in ("", "0"):
        lines.append(_row("", f"requeued {job.restarts} times"))
    if todo:
        lines.append(_row("", todo))
    if job.is_headless:
        gone = f"its first node {job.batch_host} is gone, and with it the conductor: nobody leads the run any more."
        lines += [
            _row("", gone),
            _row(
                "", "Another node on which an engine was ends this, within a minute: it requeues the job, which goes on"
            ),
            _row("", f"from the newest checkpoint, if any. Where no node does that: scontrol requeue {job.id}"),
        ]
    elif found.directory is not None and (ended := last_words(found.directory, job)):
        lines.append(_row("", ended))
    if job.state == "RUNNING" and found.session is not None and found.session.job_id == job.number:
        lines.append(_row("look inside", attach_line(job.number, found.session.first_node)))
    if found.others:
        counts = Counter(other.state for other in found.others)
        lines.append(_row("array", "its other tasks: " + ", ".join(f"{n} {state}" for state, n in counts.items())))
    return lines


def queue_lines(job: Job, place: tuple[int, int] | None) -> list[str]:
    """Say how long a job may wait; `place` is its own in the queue of its partition, and how many wait there."""
    lines = []
    if place is not None:
        lines.append(_row("queue", f"{place[0]} of {place[1]} that wait in {job.partition}, by priority"))
    with suppress(ValueError):  # Unknown
        start = datetime.fromisoformat(job.start_time)
        lines.append(_row("start", f"Slurm expects it on {start:%a %d %b at %H:%M}, or earlier when others end early"))
    return lines


def run_lines(found: Found, run_status: RunStatus | None, now: float) -> list[str]:
    """Describe the run: step, reward, pace, end."""
    if run_status is None:
        return [_row("run", "its directory is not known yet: the job prints it when it starts")]
    lines = [_row("run", f"{found.directory}{': ' + said if (said := _state(found, run_status)) else ''}")]
    if not run_status.total:
        return lines
    reward = "" if run_status.reward is None else f", reward {run_status.reward:.4g}"
    lines.append(_row("step", f"{run_status.step}/{run_status.total}{reward}"))
    lines += [_row("restart", f"{number} in place: {why}") for number, why in enumerate(run_status.restarts, 1)]
    running = run_status.status == "running" and not _cut_off(found, run_status)
    if running and run_status.starting:  # the pace is that of an earlier start
        return [*lines, _row("starting", f"{run_status.starting} ({duration(run_status.starting_s)} ago)")]
    if run_status.step_s is not None and run_status.age_s is not None:
        pace = f"{run_status.step_s:.3g} s" if run_status.step_s < 60 else duration(run_status.step_s)
        lines.append(_row("pace", f"{pace} a step, the last one {duration(run_status.age_s)} ago"))
    if running and found.directory is not None:
        lost = engines_lost(read_events(RunDirectory(found.directory).events))
        lines += [_row("engines", text.splitlines()[0]) for text in lost.values()]
    if running and run_status.left_s is not None:
        end = datetime.fromtimestamp(now + run_status.left_s)
        lines.append(_row("left", f"{duration(run_status.left_s)}, until {end:%a %H:%M}{_too_late(found.job, end)}"))
    return lines


def failure_lines(found: Found, run_status: RunStatus | None) -> list[str]:
    """Show the error, or the last lines of the logs if the run could not write one."""
    if run_status is None or found.directory is None:
        return []
    if run_status.status == "failed":
        return ["", f"error: {run_status.error}"]
    if not _cut_off(found, run_status):
        return []
    logs = [path for path in (found.directory / "logs").glob("*.log") if path.stat().st_size]
    if found.job and found.job.output and Path(found.job.output).exists():
        logs.append(Path(found.job.output))
    newest = sorted(logs, key=lambda path: path.stat().st_mtime)[-2:]
    return [
        line
        for log in newest
        for line in ("", f"the last lines of {log}:", *(f"    {text}" for text in tail(log, LINES)))
    ]


def _state(found: Found, run_status: RunStatus) -> str:
    if _cut_off(found, run_status):
        return "it was cut off in the middle and could not say why; checkpoints are intact"
    if run_status.status == "running" and (nodes := _deserted(found)):
        return (
            f"the conductor is gone, say its ranks on {shortened(nodes)}, and have left; checkpoints are intact. When "
            "Slurm finds the node down (SlurmdTimeout), it ends the job or requeues it; with --no-kill one of those "
            "nodes does"
        )
    return run_status.status


def _deserted(found: Found) -> list[str]:
    """List the nodes whose ranks have left because they heard nothing of the conductor; empty where one runs on."""
    directory, session, nodes = found.directory, found.session, set()
    if directory is None or session is None or (found.job is not None and found.job.state != "RUNNING"):
        return []
    for log in (directory / "logs").glob("*.log"):
        rank = _RANK_LOG.fullmatch(log.name)
        if rank and rank["node"] != session.first_node and log.stat().st_mtime > session.began:
            last = tail(log, _LEFT_LINES)
            if _LEFT.search(last[-1]):
                nodes.add(rank["node"])
            elif not ends_in_error(last):  # a collective failed whose rank had left, before the cause was known
                return []
    return sorted(nodes)


def _cut_off(found: Found, run_status: RunStatus) -> bool:
    """Tell whether summary.json says that the run goes on although its process is gone."""
    if run_status.status != "running":
        return False
    if found.unasked:
        return False
    if found.job_id:
        return found.job is None or bool(OVER & set(found.job.state.split(",")))
    return not found.alive


def _exit(job: Job) -> str:
    status, _, number = job.exit_code.partition(":")
    if status in ("", "0") and number in ("", "0"):
        return ""
    return f" (exit code {status}{f', signal {number}' if number not in ('', '0') else ''})"


def _too_late(job: Job | None, end: datetime) -> str:
    try:
        over = datetime.fromisoformat(job.end_time) if job else None
    except ValueError:
        return ""  # Unknown: no time limit
    return f"; its allocation ends before, {over:%a %H:%M}" if over is not None and over < end else ""


def _row(name: str, text: str) -> str:
    return f"{name:{WIDTH}}{text}"


COMMANDS = {
    "status": Command(
        USAGE,
        "RUN is a run directory or the number of a job (12, or 12_3 for a task of an array). Shows the state of the "
        "job and what to do about it, the step, the reward and the time that is left, and the last lines of what "
        "failed. Asks slurmctld once, of a job that waits twice, needs no slurmdbd, and reads the rest from the run "
        "directory.",
        run,
        {"watch": "show it until the run is over, with the rewards as a curve, phases and engines; Ctrl-C ends it"},
    ),
}
