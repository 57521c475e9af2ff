"""Have a run directory to oneself, and a log in it."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import traceback
from collections.abc import Iterator
from pathlib import Path

from slurm_rlhf.errors import ConfigError, RemoteError
from slurm_rlhf.preflight.needs import WITHOUT_LOCKS
from slurm_rlhf.run_directory import RunDirectory

log = logging.getLogger(__name__)


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
