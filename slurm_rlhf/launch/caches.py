"""A directory on the node's own disk for every run and role: torchrun's logs, and caches that are not to be kept.

On a shared file system a stale handle ends one rank and hangs the others. `cluster.kernel_cache` keeps the caches.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path


def take_cache(name: str, base: Path | None = None) -> Path:
    """A directory `name` on this node that lasts as long as this process, and whatever it becomes by exec.

    Directories of this user whose processes have ended are removed first: whoever is killed cannot clean up.
    """
    root = _private(Path(tempfile.gettempdir()) if base is None else base)
    with open(root / ".lock", "a", encoding="utf-8") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        for other in root.iterdir():
            if other.is_dir() and _abandoned(other):
                shutil.rmtree(other, ignore_errors=True)
        own = root / name
        own.mkdir(exist_ok=True)
        lock = os.open(own / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_SH)
        os.set_inheritable(lock, True)  # held until the last process that has it is gone
    return own


def _private(base: Path) -> Path:
    """A directory below `base` that nobody else can have put there or look into."""
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
