"""Keeps a run directory for one process, and leads its run to its end, to a stop, or to a continuation later."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import math
import os
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from slurm_rlhf.cluster.processes import Session
from slurm_rlhf.cluster.stop import NOT_ARRANGED, Continuation, Stop, StopRequested
from slurm_rlhf.errors import ConfigError, RemoteError
from slurm_rlhf.run_directory import RunDirectory, make_run_directory, run_directory_kept

log = logging.getLogger(__name__)

MOST_RESTARTS = 5
"""Allocations in a row that may end before a single step: the job would otherwise requeue itself for ever."""

_WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of a file system without locks: NFS without its lock daemon, Lustre that is mounted without -o flock."""


@contextlib.contextmanager
def occupied(directory: RunDirectory, node: str, end: float | None, lead_s: float) -> Iterator[None]:
    """Make the directory, keep it for this process on `node`, and write the log there.

    `end`: when the allocation ends, in seconds since the epoch. `lead_s`: slurm.signal_lead_s. Raises ConfigError where
    the time is too short, or another run uses the directory.
    """
    refuse_short_time(end, lead_s)
    make_run_directory(directory.root, directory.make)
    with exclusive(directory), logging_to(directory.role_log("conductor", node, 0)):
        Session.here(os.environ).write(directory.root)
        yield


class Leader(Protocol):
    """Leads the work in a run directory: the conductor of a training run, or a job of `slurm-rlhf generate`."""

    def work(self, stop: Stop) -> None:
        """Do the whole work of the run directory."""

    def stopped(self, request: StopRequested) -> bool:
        """Tell that `work` has ended by a stop; answer whether this allocation got anything done."""

    def failed(self, error: BaseException) -> None:
        """Note that `error` ended the work; the function that catches the error prints its message."""

    def tell(self, line: str) -> None:
        """Tell the user something."""


def lead(leader: Leader, directory: RunDirectory, end: float | None, lead_s: float, continuation: Continuation) -> int:
    """Let `leader` do its work in an occupied directory; return the exit code. Raises what the work raises.

    After a stop that was asked for, `continuation` makes the run go on where the scheduler allows.
    """
    try:
        with Stop(directory.root, end, lead_s) as stop:
            try:
                with run_directory_kept(directory.root):
                    leader.work(stop)
            except StopRequested as request:
                moved, reason = leader.stopped(request), request.reason
                if not reason.requeue:
                    return reason.exit_code
                refuse_restart(directory.restart_guard, moved, lead_s)
                arranged = continuation.go_on()  # comes last, because Slurm may end this process before it returns
                leader.tell(arranged.text)
                return reason.exit_code if arranged.sure else NOT_ARRANGED
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        if isinstance(error, RemoteError) and error.remote_traceback:
            text += f"\nin the role:\n{error.remote_traceback}"
        log.error("%s", text)
        leader.failed(error)
        raise
    if called_off := continuation.finished():
        leader.tell(called_off)
    return 0


@contextlib.contextmanager
def exclusive(directory: RunDirectory) -> Iterator[None]:
    """Keep a second run out of the directory."""
    with open(directory.lock, "a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{directory.root} is in use by another run. Wait for it, or give this one its own --run_dir."
            ) from None
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise
            print(
                f"warning: {directory.root} cannot be locked ({error.strerror}): start no second run in it", flush=True
            )
        yield


class _LogFile(logging.FileHandler):
    """Writes the log, and drops lines when the disk is full: the run itself reports that."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Drop the record, without the traceback that the library would print."""


@contextlib.contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Write the package's log messages into the conductor's own file."""
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("slurm_rlhf")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        with contextlib.suppress(OSError):
            handler.close()


def refuse_short_time(end: float | None, lead_s: float) -> None:
    """Raise ConfigError where the allocation, which ends at `end` (since the epoch), has no time to train."""
    left_s = math.inf if end is None else end - time.time()
    if left_s <= lead_s:
        raise ConfigError(
            f"the allocation ends in {left_s:.0f} s, and slurm.signal_lead_s = {lead_s:g} keeps all of that for "
            f"saving: ask for more time (--time), or give --slurm.signal_lead_s={max(left_s, 0) / 3:.0f} or less and, "
            "in the batch script, the same number in --signal=B:USR1@SECONDS"
        )


def refuse_restart(file: Path, moved: bool, lead_s: float) -> None:
    """Count this allocation in `file`; `moved`: it did a step. Raises ConfigError after `MOST_RESTARTS` without one."""
    if moved:
        file.unlink(missing_ok=True)
        return
    count = 1 + (int(file.read_text(encoding="utf-8")) if file.exists() else 0)
    if count < MOST_RESTARTS:
        file.write_text(str(count), encoding="utf-8")
        return
    file.unlink()
    raise ConfigError(
        f"{count} times in a row this run had to stop before it had done a single step, so it does not requeue "
        f"itself once more: ask for more time (--time), or let it stop later (slurm.signal_lead_s = {lead_s:g}, and "
        "--signal=B:USR1@SECONDS in the batch script). Checkpoints are intact."
    )
