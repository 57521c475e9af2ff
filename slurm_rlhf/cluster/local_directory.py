"""Directories on a node's own disk, for this user alone, which last as long as the processes that use them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_LOCK = ".lock"
_LONGEST = 40
"""Characters of a temporary directory below which sockets may be: a socket's path has 107 at most, a name 37."""


@dataclass(slots=True)
class LocalDirectory:
    """Holds a directory until `remove`, or until this process and whatever it becomes by exec have ended."""

    path: Path
    _lock: int | None  # a descriptor; None: it is removed

    def remove(self) -> None:
        """Remove it with all that is in it."""
        if self._lock is None:
            return
        remove_directory(self.path)
        os.close(self._lock)
        self._lock = None


def remove_directory(path: Path) -> None:
    """Remove a directory of this user's, and the one above it if it was the last."""
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError), _locked(path.parent):
        if os.listdir(path.parent) == [_LOCK]:
            shutil.rmtree(path.parent)


def take_directory(name: str, base: Path | None = None) -> LocalDirectory:
    """Make a directory `name`, for logs, sockets, and caches that are not kept.

    Directories of this user whose processes have ended are removed first: a killed process cannot clean up. A shared
    file system will not do: there a stale handle ends one rank and hangs the others. `kernel_cache` is what keeps
    caches.
    """
    root = _private(Path(tempfile.gettempdir()) if base is None else base)
    with _locked(root):
        for other in root.iterdir():
            if other.is_dir() and _abandoned(other):
                shutil.rmtree(other, ignore_errors=True)
        own = root / name
        own.mkdir(mode=0o700, exist_ok=True)
        lock = os.open(own / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_SH)
        os.set_inheritable(lock, True)  # held until the last process that has it is gone
    return LocalDirectory(own, lock)


def take_temporary() -> LocalDirectory:
    """Make the directory for temporary files of the processes that this one starts: the value of their TMPDIR.

    Unix sockets are made there, and their paths must be short.
    """
    place = tempfile.gettempdir()
    return take_directory(f"{os.getpid()}.{os.urandom(3).hex()}", Path(place if len(place) <= _LONGEST else "/tmp"))


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Keep other processes from making and removing directories in `root`, which exists again if one removed it."""
    while True:
        root.mkdir(mode=0o700, exist_ok=True)
        with open(root / _LOCK, "a", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if (root / _LOCK).exists() and os.path.samestat(os.fstat(file.fileno()), (root / _LOCK).stat()):
                yield
                return


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
        lock = os.open(directory / _LOCK, os.O_RDWR)
    except OSError:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True
