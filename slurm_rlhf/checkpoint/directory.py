"""Write the checkpoints of a run so that a kill at any moment leaves the previous one usable.

step_000010.tmp/     roles and conductor write here; worth nothing until it is renamed
step_000010/         whole, with its manifest
step_000010.old/     the checkpoint that a new one of the same step is about to replace; still whole
step_*.tmp           also what is being deleted: a directory is renamed before its first file is removed
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_rlhf.checkpoint import resume
from slurm_rlhf.checkpoint.resume import describe, entries, passed_over, read, verify, write, write_state
from slurm_rlhf.errors import CheckpointError, RemoteError
from slurm_rlhf.run_directory import MIB, refusal, remedy, size_of, vanished


class CheckpointDir:
    """Save, find and prune `<run_dir>/checkpoints/step_000010/`: a directory per role, state.json, manifest.json.

    Only the conductor calls it; the roles write into the directory that `begin` returns. To save:

        path = checkpoints.begin(step)      # then every role writes into path / <role> and closes its files
        checkpoints.commit(step, state)     # from here on it exists
        checkpoints.prune(max_num)
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.root = Path(run_dir) / "checkpoints"

    def begin(self, step: int) -> Path:
        """Make an empty directory for the roles to write into, each under its own name.

        Removes what interrupted saves have left. Raises CheckpointError when the disk refuses.
        """
        with self.explained(step):
            self.root.mkdir(parents=True, exist_ok=True)
            for leftover in self.root.glob("step_*.tmp"):
                shutil.rmtree(leftover)
            path = self._temporary(step)
            path.mkdir()
        return path

    def commit(self, step: int, state: dict[str, Any]) -> Path:
        """Complete what `begin` started, once every role has written, and return its final path.

        Adds the state and the manifest, forces all of it to disk, then renames. Replaces a checkpoint of the same
        step. Blocks for as long as the disk needs. Raises CheckpointError when the disk refuses, TypeError for a state
        that JSON does not have (see `resume.write_state`); the earlier checkpoints are untouched then.
        """
        temporary, final = self._temporary(step), self.of(step)
        with self.explained(step):
            if not temporary.is_dir() and self.root.parent.is_dir():
                raise CheckpointError(
                    f"{temporary} has vanished while checkpoint {step} was written into it. Does another run use the "
                    "same run_dir? Give each run its own"
                )
            write_state(state, temporary)
            serial = max((entry.manifest.serial for entry in resume.entries(self.root)[0]), default=0) + 1
            write(describe(temporary, step, serial), temporary)
            for parent, _, names in os.walk(temporary, topdown=False):
                for name in names:
                    _flush(os.path.join(parent, name))
                _flush(parent)
            _make_way(final)
            os.rename(temporary, final)
            _flush(self.root)
            if _old(final).exists():
                _remove(_old(final))
        return final

    def prune(self, max_num: int, kept: Collection[int] = ()) -> list[Path]:
        """Remove all but the newest `max_num` checkpoints and those of the steps `kept`; return what was removed.

        Directories without a readable manifest are not counted and not removed. Raises CheckpointError when the
        disk refuses.
        """
        older = resume.entries(self.root)[0][max_num:]
        surplus = [entry.path for entry in older if entry.manifest.step not in kept]
        for path in reversed(surplus):
            with self.explained(None):
                _remove(path)
        return surplus

    def of(self, step: int) -> Path:
        """Return the path of a step's checkpoint, whether it is there or not."""
        return self.root / f"step_{step:06d}"

    def latest(self) -> Path | None:
        """Return the newest whole checkpoint. Reads all files, up to a size (see `resume`): slow."""
        return resume.latest(self.root)

    def resolve(self, resume_key: str) -> Path | None:
        """Return the checkpoint that the key `resume` asks for (see `resume.resolve`). Raises CheckpointError."""
        return resume.resolve(self.root, resume_key)

    def load_state(self, path: Path, roles: Sequence[str] = ()) -> dict[str, Any]:
        """Check a checkpoint and return its state (see `resume.load_state`). Raises CheckpointError."""
        return resume.load_state(path, roles)

    @contextmanager
    def explained(self, step: int | None) -> Iterator[None]:
        """Turn what a disk raises while checkpoint `step` is written (None: while old ones go) into CheckpointError.

        It says how full the disk is, what a checkpoint needs, and which one is still usable. A role's error counts too,
        if it tells of a full disk.
        """
        try:
            yield
        except (OSError, RemoteError) as error:
            sizes = [size_of(entry.path) for entry in resume.entries(self.root)[0]]
            begun = 0 if step is None or sizes else size_of(self._temporary(step))
            needed = max(sizes, default=0)
            refused = refusal(error, self.root, needed)
            if isinstance(error, RemoteError) and not refused:
                raise
            what = "checkpoints could not be pruned" if step is None else f"checkpoint {step} could not be written"
            if not self.root.parent.is_dir():
                raise CheckpointError(f"{what}: {vanished(self.root.parent)}") from error
            if refused and begun:
                refused += f"; {begun / MIB:.1f} MiB were written before that"
            usable = resume.latest(self.root)
            rest = f"The newest whole checkpoint is {usable}" if usable else "There is no earlier checkpoint"
            raise CheckpointError(
                f"{what} in {self.root}: {refused or error}. {rest}. "
                f"{remedy(error, self.root, needed, f'; {len(sizes)} are there')}, then resume"
            ) from error

    def _temporary(self, step: int) -> Path:
        return self.root / f"step_{step:06d}.tmp"


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
    renamed = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    os.rename(path, renamed)
    shutil.rmtree(renamed)


def _flush(path: str | Path) -> None:
    """Force a file or directory to disk, whichever process wrote it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some parallel file systems cannot fsync a directory and report EINVAL.
        if error.errno != errno.EINVAL or not os.path.isdir(path):
            raise
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class WayBack:
    """Remembers what was there when a run started."""

    directory: CheckpointDir
    first: Path | None  # the checkpoint that it started from; None: it began anew
    serial: int  # number of the newest checkpoint of then

    @classmethod
    def of(cls, directory: CheckpointDir, first: Path | None) -> WayBack:
        """Look at what is there now."""
        found = entries(directory.root)[0]
        return cls(directory, first, max((entry.manifest.serial for entry in found), default=0))

    def find(self, tell: Callable[[str], None]) -> Path | None:
        """Return the newest whole checkpoint that the run has written since, or else the one that it started from.

        None: it begins anew. `tell` gets a warning for each newer one that is damaged. Raises CheckpointError where
        there are checkpoints and none of them is whole.
        """
        newest = self.directory.resolve("auto")
        if newest is None or read(newest).serial <= self.serial:
            newest = self.first
        if newest is not None:
            for problem in passed_over(self.directory.root, newest):
                tell(f"warning: {problem}; the run goes back to {newest.name}, which is whole")
        return newest
