"""Faults of files: a disk that is full, a directory that goes away, a checkpoint that is damaged."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from small_disk import small_disk, unmount

from slurm_rlhf.errors import RunError

DISK = 96 << 20
"""Bytes of the small disk, or of the quota on a large one: enough for a few checkpoints of the tiny run."""
LARGE = 512 << 20
"""Bytes of the disk with a quota, as its file says; it takes as much as is written."""
LITTLE = 16 << 10
"""Bytes that a process may write to a file under a limit."""
FILLER = "filler"


@contextmanager
def quota_disk(path: Path) -> Iterator[Path]:
    """Mount a btrfs at `path` for the block, and yield a directory on it that has a quota of `DISK` bytes.

    The quota holds for root, too. Only root may, where btrfs-progs are installed.
    """
    path.mkdir(parents=True)
    image, home = path.with_name(f"{path.name}.img"), path / "quota"
    with image.open("wb") as file:
        file.truncate(LARGE)
    try:
        _run("mkfs.btrfs", "--quiet", str(image))
        _run("mount", "-o", "loop", str(image), str(path))
        try:
            _run("btrfs", "subvolume", "create", str(home))
            _run("btrfs", "quota", "enable", str(path))
            _run("btrfs", "qgroup", "limit", str(DISK), str(home))
            yield home
        finally:
            unmount(path)
    finally:
        image.unlink()


def _run(*words: str) -> None:
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL, capture_output=True)


DISKS: Final[dict[str, Callable[[Path], AbstractContextManager[Path]]]] = {
    "root": partial(small_disk, size=str(DISK)),
    "quota": quota_disk,
}
"""What a fault needs -> the disk that it is for. `fill` leaves nothing free on it."""


def disks_here() -> set[str]:
    """Return which of `DISKS` this process may mount."""
    return {need for need, disk in DISKS.items() if _mounts(disk)}


def _mounts(disk: Callable[[Path], AbstractContextManager[Path]]) -> bool:
    with tempfile.TemporaryDirectory(prefix="campaign-") as place:
        try:
            with disk(Path(place) / "disk"):
                return True
        except (OSError, subprocess.CalledProcessError):
            return False


def fill(disk: Path) -> None:
    """Leave nothing free on a disk, whoever writes to it meanwhile."""
    with (disk / FILLER).open("wb") as file:
        end = 0
        for size in (1 << 20, 1 << 16, 1 << 12):
            with contextlib.suppress(OSError):
                while True:
                    os.posix_fallocate(file.fileno(), end, size)
                    end += size


def free(disk: Path) -> None:
    """Make room again."""
    (disk / FILLER).unlink(missing_ok=True)


def limit_file_size(pid: int) -> None:
    """Let a process write no file beyond `LITTLE` bytes from now on, as a quota does."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (LITTLE, LITTLE))


def remove_all(directory: Path) -> None:
    """Remove a directory in one step, and then what was in it."""
    gone = directory.with_name(f"{directory.name}.gone")
    directory.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def damage(checkpoints: Path, how: str) -> Path:
    """Damage the newest checkpoint: `truncated`, `flipped bit`, `without manifest`, `without actor`.

    Returns its directory. Raises RunError when there are not two: the one before has to be left.
    """
    whole = sorted(path for path in checkpoints.glob("step_*") if path.name.removeprefix("step_").isdigit())
    if len(whole) < 2:
        raise RunError(f"{checkpoints} has {len(whole)} checkpoints, and two are needed")
    newest = whole[-1]
    if how == "without manifest":
        (newest / "manifest.json").unlink()
    elif how == "without actor":
        shutil.rmtree(newest / "actor")
    else:
        largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
        with largest.open("r+b") as file:
            size = largest.stat().st_size
            if how == "truncated":
                file.truncate(size // 2)
            else:
                file.seek(size // 2)
                byte = file.read(1)
                file.seek(size // 2)
                file.write(bytes([byte[0] ^ 1]))
    return newest
