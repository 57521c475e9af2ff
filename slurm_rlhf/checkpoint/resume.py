"""Find the checkpoint to resume from."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_rlhf.checkpoint.manifest import Manifest, read, read_state, verify
from slurm_rlhf.errors import CheckpointError

log = logging.getLogger(__name__)

# `.old`: a save that replaced a checkpoint of the same step was killed before it was done (see `CheckpointDir.commit`).
NAME = re.compile(r"step_(\d{6,})(\.old)?")


@dataclass(slots=True, frozen=True)
class Entry:
    """Name a checkpoint directory whose manifest can be read; its files are not checked yet."""

    path: Path
    manifest: Manifest


def entries(root: Path) -> tuple[list[Entry], list[CheckpointError]]:
    """Return the checkpoints under `root`, newest first, and what is wrong with directories that only look like one.

    Raises CheckpointError when `root` cannot be listed.
    """
    found, problems = [], []
    try:
        paths = sorted(root.iterdir()) if root.is_dir() else []
    except OSError as error:
        raise CheckpointError(f"{root} cannot be searched for checkpoints: {error}. Check its permissions") from error
    for path in paths:
        if NAME.fullmatch(path.name) and path.is_dir():
            try:
                found.append(Entry(path, read(path)))
            except CheckpointError as error:
                problems.append(error)
    return sorted(found, key=lambda entry: -entry.manifest.serial), problems


def latest(root: Path) -> Path | None:
    """Return the newest checkpoint under `root` that is whole. Damaged ones are skipped with a warning in the log."""
    return _search(root)[0]


def load_state(path: Path, roles: Sequence[str] = ()) -> dict[str, Any]:
    """Check all files of a checkpoint and return the state that was committed with it.

    Raises CheckpointError that says what is wrong and names the checkpoint to use instead, if there is one; and where
    it has no part of one of `roles`.
    """
    try:
        verify(path)
        state = read_state(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. {_advice(path)}") from error
    missing = [role for role in roles if not (path / role).is_dir()]
    if missing:
        raise CheckpointError(
            f"{path} holds no {' and no '.join(missing)}: the run that wrote it had none, by another "
            "algo.advantage.estimator. Resume with that one, or begin anew in another --run_dir"
        )
    return state


def resolve(root: Path, resume: str) -> Path | None:
    """Return the checkpoint that the key `resume` asks for: auto, never or a directory. None: start from the beginning.

    Raises CheckpointError when the named directory is not a whole checkpoint, and for auto when there are
    checkpoints but none is whole: starting from the beginning would hide the loss.
    """
    if resume == "never":
        return None
    if resume != "auto":
        load_state(Path(resume))
        return Path(resume)
    newest, problems = _search(root)
    if newest is None and problems:
        listed = "\n  ".join(str(problem) for problem in problems)
        raise CheckpointError(
            f"no checkpoint in {root} is whole:\n  {listed}\n"
            "To start from the beginning, remove them or add --resume never."
        )
    return newest


def _search(root: Path) -> tuple[Path | None, list[CheckpointError]]:
    found, problems = entries(root)
    for problem in problems:
        log.warning("%s; it is skipped", problem)
    for entry in found:
        try:
            verify(entry.path)
            return entry.path, problems
        except CheckpointError as error:
            log.warning("%s; it is skipped", error)
            problems.append(error)
    return None, problems


def passed_over(root: Path, chosen: Path) -> list[str]:
    """Say what is wrong with the checkpoints under `root` that are newer than `chosen`. Reads their files."""
    found, problems = entries(root)
    serial = read(chosen).serial
    found_wrong = [str(problem) for problem in problems]
    for entry in found:
        if entry.manifest.serial > serial:
            try:
                verify(entry.path)
            except CheckpointError as error:
                found_wrong.append(str(error))
    return found_wrong


def _advice(path: Path) -> str:
    """Say where a whole checkpoint is: next to `path`, or under it when it is a run directory."""
    for root in (path.parent, path, path / "checkpoints"):
        usable = latest(root)
        if usable is not None and usable != path:
            return f"The newest whole checkpoint there is {usable}"
    return "There is no other checkpoint next to it; --resume never starts from the beginning"
