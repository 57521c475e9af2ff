"""Have a run directory to oneself, and a log in it."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from slurm_rlhf.errors import ConfigError, RemoteError
from slurm_rlhf.nodes.needs import WITHOUT_LOCKS
from slurm_rlhf.run_directory import RunDirectory

log = logging.getLogger(__name__)

MOST_RESTARTS = 5
"""Allocations in a row that may end before a single step: the job would otherwise requeue itself for ever."""


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
            if error.errno not in WITHOUT_LOCKS:
                raise
            print(
                f"warning: {directory.root} cannot be locked ({error.strerror}): start no second run in it", flush=True
            )
        yield


class _LogFile(logging.FileHandler):
    """Writes what the disk takes: when it is full, the run says so itself."""

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


def log_error(error: BaseException) -> None:
    """Write an error into the log with its traceback, and with that of a rank where it comes from one."""
    text = "".join(traceback.format_exception(error))
    if isinstance(error, RemoteError) and error.remote_traceback:
        text += f"\nin the role:\n{error.remote_traceback}"
    log.error("%s", text)


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
        f"{count} times in a row this run was told to stop before it had done a single step, so it does not requeue "
        f"itself once more: ask for more time (--time), or let it stop later (slurm.signal_lead_s = {lead_s:g}, and "
        "--signal=B:USR1@SECONDS in the batch script). Checkpoints are intact."
    )
