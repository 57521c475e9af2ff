"""Writing a checkpoint so that a kill at any moment leaves the previous one usable.

step_000010.tmp/     roles and conductor write here; worth nothing until it is renamed
step_000010/         whole, with its manifest
step_000010.old/     the checkpoint that a new one of the same step is about to replace; still whole
step_*.tmp           also what is being deleted: a directory is renamed before its first file goes
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slurm_rlhf.checkpoint.manifest import describe, verify, write
from slurm_rlhf.checkpoint.resume import entries, latest
from slurm_rlhf.checkpoint.state import write_state
from slurm_rlhf.errors import CheckpointError, ConfigError


def begin(root: Path, step: int) -> Path:
    """An empty directory for the roles to write into, each under its own name.

    Removes what interrupted saves have left. Raises CheckpointError when the disk refuses.
    """
    with _explained(root, step):
        root.mkdir(parents=True, exist_ok=True)
        for leftover in root.glob("step_*.tmp"):
            shutil.rmtree(leftover)
        path = _temporary(root, step)
        path.mkdir()
    return path


def commit(root: Path, step: int, state: dict[str, Any]) -> Path:
    """Complete what `begin` started, once every role has written: its final path.

    Adds the state and the manifest, forces all of it to disk, then renames. Replaces a checkpoint of the same step.
    Blocks for as long as the disk needs. Raises CheckpointError when the disk refuses, TypeError (see
    `state.write_state`); the earlier checkpoints are untouched then.
    """
    temporary, final = _temporary(root, step), root / f"step_{step:06d}"
    with _explained(root, step):
        if not temporary.is_dir():
            raise CheckpointError(
                f"{temporary} has vanished while checkpoint {step} was written into it. Does another run use the same "
                "run_dir? Give each run its own"
            )
        write_state(state, temporary)
        serial = max((entry.manifest.serial for entry in entries(root)[0]), default=0) + 1
        write(describe(temporary, step, serial), temporary)
        for parent, _, names in os.walk(temporary, topdown=False):
            for name in names:
                _flush(os.path.join(parent, name))
            _flush(parent)
        _make_way(final)
        os.rename(temporary, final)
        _flush(root)
        if _old(final).exists():
            _remove(_old(final))
    return final


def prune(root: Path, max_num: int) -> list[Path]:
    """Remove all but the newest `max_num` checkpoints; returns what was removed.

    Directories without a readable manifest are nobody's checkpoint: they neither count nor go.
    Raises ConfigError when max_num is below 1, CheckpointError when the disk refuses.
    """
    if max_num < 1:
        raise ConfigError(f"ckpt.max_num = {max_num}; it must be at least 1, or the run could never be resumed")
    surplus = [entry.path for entry in entries(root)[0]][max_num:]
    for path in reversed(surplus):
        with _explained(root, None):
            _remove(path)
    return surplus


def _temporary(root: Path, step: int) -> Path:
    return root / f"step_{step:06d}.tmp"


def _old(final: Path) -> Path:
    return final.with_name(final.name + ".old")


def _make_way(final: Path) -> None:
    """Free the final name without ever being short of a whole checkpoint."""
    if not final.exists():
        return
    try:
        verify(final)
    except CheckpointError:
        _remove(final)
        return
    if _old(final).exists():
        _remove(_old(final))
    os.rename(final, _old(final))


def _remove(path: Path) -> None:
    doomed = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def _flush(path: str | Path) -> None:
    """fsync of a file or directory, whichever process wrote it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some parallel file systems cannot fsync a directory, and say so in this way.
        if error.errno != errno.EINVAL or not os.path.isdir(path):
            raise
    finally:
        os.close(descriptor)


@contextmanager
def _explained(root: Path, step: int | None) -> Iterator[None]:
    """Turn an OSError into an error that says which checkpoint is still there."""
    try:
        yield
    except OSError as error:
        usable = latest(root)
        what = "checkpoints could not be pruned" if step is None else f"checkpoint {step} could not be written"
        rest = f"The newest whole checkpoint is {usable}" if usable else "There is no earlier checkpoint"
        raise CheckpointError(
            f"{what} in {root}: {error}. {rest}. Free space there or set run_dir to another disk, then resume"
        ) from error
