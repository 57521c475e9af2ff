"""The manifest of a checkpoint: which files it consists of, and how to tell that they are still what was written.

    checkpoints/step_000010/manifest.json
        format, step, serial, files: {path: {size, sha256, whole}}, digest (SHA-256 of all that comes before)

`serial` counts the checkpoints of a run directory in the order in which they were written. It and not the step decides
which one is newest: a run that was resumed from step 10 writes step 15 after the abandoned step 20.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slurm_rlhf.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 1
WHOLE_LIMIT = 64 << 20  # larger files are not read as a whole: a checkpoint of 500 GB must not take an hour to check
ENDS = 1 << 20


@dataclass(slots=True, frozen=True)
class FileRecord:
    """One file as it was written."""

    size: int  # bytes
    sha256: str
    whole: bool  # False: the hash is of the first and the last MiB only


@dataclass(slots=True, frozen=True)
class Manifest:
    """What a checkpoint directory has to hold."""

    step: int
    serial: int
    files: dict[str, FileRecord]  # path relative to the directory, with forward slashes


def describe(directory: Path, step: int, serial: int) -> Manifest:
    """The manifest of all files that are in `directory` now. Raises OSError."""
    paths = sorted(Path(parent, name) for parent, _, names in os.walk(directory) for name in names)
    files = {p.relative_to(directory).as_posix(): _record(p) for p in paths if p != directory / MANIFEST}
    return Manifest(step, serial, files)


def write(manifest: Manifest, directory: Path) -> None:
    """Write the manifest into the directory. Raises OSError."""
    body: dict[str, Any] = {"format": FORMAT, **asdict(manifest)}
    (directory / MANIFEST).write_text(json.dumps({**body, "digest": _digest(body)}, indent=1) + "\n", encoding="utf-8")


def read(directory: Path) -> Manifest:
    """The directory's manifest. Raises CheckpointError when there is none that can be trusted."""
    path = directory / MANIFEST
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        what = "there is no manifest.json in it" if directory.is_dir() else "there is no such directory"
        raise CheckpointError(f"{directory} is not a checkpoint: {what}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory} is damaged: its manifest.json cannot be read ({error})") from error
    version = body.get("format") if isinstance(body, dict) else None
    if isinstance(version, int) and version > FORMAT:
        raise CheckpointError(f"{directory} has checkpoint format {version}, this version of slurm_rlhf reads {FORMAT}")
    if not isinstance(body, dict) or body.pop("digest", None) != _digest(body):
        raise CheckpointError(f"{directory} is damaged: its manifest.json is not what was written")
    return Manifest(
        body["step"], body["serial"], {path: FileRecord(**record) for path, record in body["files"].items()}
    )


def verify(directory: Path) -> Manifest:
    """The manifest, after every file has been checked. Files it does not list are ignored.

    Raises CheckpointError that names the first file which is missing or differs.
    """
    manifest = read(directory)
    for name, record in manifest.files.items():
        problem = _difference(directory / name, record)
        if problem:
            raise CheckpointError(f"{directory} is damaged: {name} {problem}")
    return manifest


def _difference(path: Path, record: FileRecord) -> str:
    try:
        size = path.stat().st_size
        if size != record.size:
            return f"has {size} bytes instead of {record.size}"
        return "" if _hash(path, record.whole) == record.sha256 else "does not have the contents that were written"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error})"


def _record(path: Path) -> FileRecord:
    size = path.stat().st_size
    whole = size <= WHOLE_LIMIT
    return FileRecord(size, _hash(path, whole), whole)


def _hash(path: Path, whole: bool) -> str:
    with path.open("rb") as file:
        if whole:
            return hashlib.file_digest(file, "sha256").hexdigest()
        first = file.read(ENDS)
        file.seek(-ENDS, os.SEEK_END)
        return hashlib.sha256(first + file.read(ENDS)).hexdigest()


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
