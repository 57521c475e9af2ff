"""Faults of files: a disk that is full, a directory that goes away, a checkpoint that is damaged."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from small_disk import small_disk

from slurm_rlhf.errors import RunError

DISK = 96 << 20
"""Bytes of the small disk: enough for a few checkpoints of the tiny run."""
FILLER = "filler"


def can_mount() -> bool:
    """Tell whether this process may mount a small disk."""
    with tempfile.TemporaryDirectory(prefix="campaign-") as place:
        try:
            with small_disk(Path(place) / "disk", str(DISK)):
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
