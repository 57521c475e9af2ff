"""A file system that is soon full; only root can mount it."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def small_disk(path: Path, size: str) -> Iterator[Path]:
    """Mount a file system of `size` (as mount takes it, 64k) in memory at `path`, which is made."""
    path.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)  # whoever still uses it
        with contextlib.suppress(OSError):
            path.rmdir()
