"""Directories on a node's own disk, for this user alone, which last as long as the processes that use them."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

_LONGEST = 40
"""Characters of a temporary directory below which sockets may be: a socket's path has 107 at most, vLLM's names 37."""


@dataclass(slots=True)
class LocalDirectory:
    """Holds a directory until `remove`, or until this process and whatever it becomes by exec have ended."""

    path: Path
    _lock: int | None  # a descriptor; None: it is removed

    def remove(self) -> None:
        """Remove it with all that is in it."""
        if self._lock is None:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = None


def take_directory(name: str, base: Path | None = None) -> LocalDirectory:
    """Make a directory `name`, for logs, sockets, and caches that are not kept.

    Directories of this user whose processes have ended are removed first: a killed process cannot clean up. A shared
    file system will not do: there a stale handle ends one rank and hangs the others. `kernel_cache` is what keeps
    caches.
    """
    root = _private(Path(tempfile.gettempdir()) if base is None else base)
    with open(root / ".lock", "a", encoding="utf-8") as root_lock:
        fcntl.flock(root_lock, fcntl.LOCK_EX)
        for other in root.iterdir():
            if other.is_dir() and _abandoned(other):
                shutil.rmtree(other, ignore_errors=True)
        own = root / name
        own.mkdir(mode=0o700, exist_ok=True)
        lock = os.open(own / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_SH)
        os.set_inheritable(lock, True)  # held until the last process that has it is gone
    return LocalDirectory(own, lock)


def take_for_sockets() -> LocalDirectory:
    """Make a directory of this process for Unix sockets, whose paths must be short."""
    place = tempfile.gettempdir()
    return take_directory(f"{os.getpid()}.{os.urandom(3).hex()}", Path(place if len(place) <= _LONGEST else "/tmp"))


def _private(base: Path) -> Path:
    """Make a directory below `base` that no other user can have created or can read."""
    root = base / f"slurm_rlhf.{os.getuid()}"
    try:
        root.mkdir(mode=0o700)
    except FileExistsError:
        found = root.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            return Path(tempfile.mkdtemp(prefix=f"{root.name}.", dir=base))
    return root


def _abandoned(directory: Path) -> bool:
    try:
        lock = os.open(directory / ".lock", os.O_RDWR)
    except OSError:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True
