"""Run `slurm-rlhf cancel RUN`: end a run, at once or after it has saved."""

from __future__ import annotations

import os
import signal
import socket

from slurm_rlhf.cli.main import Command
from slurm_rlhf.cli.status import Found, find
from slurm_rlhf.cluster.slurm_job import OVER, command
from slurm_rlhf.cluster.stop import STOP_FILE
from slurm_rlhf.errors import ConfigError, RunError

USAGE = "usage: slurm-rlhf cancel RUN [--save_first]"


def run(words: list[str]) -> int:
    """Cancel the run and say so. Raises ConfigError when RUN names no run, RunError when it cannot be cancelled."""
    flags = [word for word in words if word.replace("-", "_") == "__save_first"]
    names = [word for word in words if word not in flags]
    if len(names) != 1 or names[0].startswith("-"):
        raise ConfigError(f"cancel takes one run directory or job number\n{USAGE}")
    found = find(names[0])
    print(_save_first(found) if flags else _cancel(found, names[0]))
    return 0


def _save_first(found: Found) -> str:
    if found.directory is None:
        raise ConfigError(
            f"the directory of job {found.job_id} is not known yet: give the run directory, or leave out --save_first"
        )
    if not _running(found):
        return _nothing(found)
    (found.directory / STOP_FILE).touch()
    return f"{found.directory} will save and end; `slurm-rlhf status {found.directory}` shows when it has"


def _cancel(found: Found, word: str) -> str:
    if found.unasked:
        raise RunError(found.unasked)
    if found.job_id:
        if found.job is None or (found.job.state in OVER and all(other.state in OVER for other in found.others)):
            return _nothing(found)
        # If the number of an array was given: all of its tasks, those that wait included.
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


def _running(found: Found) -> bool:
    if found.unasked:
        return True  # an unread stop file does no harm
    return found.job.state not in OVER if found.job else found.alive


def _nothing(found: Found) -> str:
    return f"nothing to cancel: {f'job {found.job_id}' if found.job_id else found.directory} is over"


COMMANDS = {
    "cancel": Command(
        USAGE,
        "RUN is a run directory or the number of a job (12_3 for one task of an array, 12 for all of them). Cancels "
        "the job; the run saves if it can do so within KillWait, 30 s on most clusters. A run without Slurm gets "
        "SIGTERM, and saves.",
        run,
        {"save_first": "let the run save, however long that takes, and then end; its job ends with exit code 0"},
    ),
}
