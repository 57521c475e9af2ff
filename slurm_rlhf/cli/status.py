"""Run `slurm-rlhf status RUN`: show the job, how far the run is, and the last lines of what failed."""

from __future__ import annotations

import time
from collections import Counter
from datetime import datetime
from pathlib import Path

from slurm_rlhf.cli.arguments import Command
from slurm_rlhf.cli.run_lookup import Found, find
from slurm_rlhf.cluster.processes import attach_line
from slurm_rlhf.cluster.slurm_job import OVER, Job, reason_words, state_words
from slurm_rlhf.errors import ConfigError
from slurm_rlhf.observe.log_tail import tail
from slurm_rlhf.observe.progress import duration
from slurm_rlhf.observe.run_status import RunStatus, read_run_status

USAGE = "usage: slurm-rlhf status RUN"
WIDTH = 12
LINES = 12


def run(words: list[str]) -> int:
    """Print the status. Raises ConfigError when RUN names no run, RunError if slurmctld does not answer."""
    if len(words) != 1 or words[0].startswith("-"):
        raise ConfigError(f"status takes one run directory or job number\n{USAGE}")
    found = find(words[0])
    run_status = None
    if found.directory is not None:
        run_status = read_run_status(found.directory / "metrics.jsonl", found.directory / "summary.json")
    print("\n".join([*job_lines(found), *run_lines(found, run_status, time.time()), *failure_lines(found, run_status)]))
    return 0


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
    if job.restarts not in ("", "0"):
        lines.append(_row("", f"requeued {job.restarts} times"))
    if todo:
        lines.append(_row("", todo))
    if job.state == "RUNNING" and found.session is not None and found.session.job_id == job.number:
        lines.append(_row("look inside", attach_line(job.number, found.session.first_node)))
    if found.others:
        counts = Counter(other.state for other in found.others)
        lines.append(_row("array", "its other tasks: " + ", ".join(f"{n} {state}" for state, n in counts.items())))
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
    if run_status.step_s is not None and run_status.age_s is not None:
        pace = f"{run_status.step_s:.3g} s" if run_status.step_s < 60 else duration(run_status.step_s)
        lines.append(_row("pace", f"{pace} a step, the last one {duration(run_status.age_s)} ago"))
    if _is_running(found, run_status) and run_status.left_s is not None:
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
    return [line for log in newest for line in ("", f"the last lines of {log}:", *_indented(log))]


def _indented(log: Path) -> list[str]:
    return [f"    {line}" for line in tail(log, LINES)]


def _state(found: Found, run_status: RunStatus) -> str:
    if _cut_off(found, run_status):
        return "it was cut off in the middle and could not say why; checkpoints are intact"
    return run_status.status


def _is_running(found: Found, run_status: RunStatus) -> bool:
    return run_status.status == "running" and not _cut_off(found, run_status)


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
        "failed. Asks slurmctld once, needs no slurmdbd, and reads the rest from the run directory.",
        run,
    ),
}
