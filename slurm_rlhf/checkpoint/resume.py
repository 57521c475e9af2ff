"""Find the checkpoint to resume from; list its files in a manifest, verify them, write and read the conductor's state.

    checkpoints/step_000010/manifest.json
        format, step, serial, files: {path: {size, sha256, whole}}, digest (SHA-256 of the other fields)
    checkpoints/step_000010/state.json
        the state of the conductor

`serial` counts the checkpoints of a run directory in the order in which they were written. The newest checkpoint is the
one with the highest serial, not step: a run that was resumed from step 10 writes step 15 after the abandoned step 20.

When a run or a stage goes on from a checkpoint, its keys and model are compared with those of the run that wrote it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slurm_rlhf.config.keys import all_keys
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.text import dump_toml, flat, stored_keys, toml_value
from slurm_rlhf.errors import CheckpointError, ConfigError

MANIFEST = "manifest.json"
STATE = "state.json"
FORMAT = 1
WHOLE_LIMIT = 64 << 20  # larger files are not read as a whole: a checkpoint of 500 GB must not take an hour to check
ENDS = 1 << 20


@dataclass(slots=True, frozen=True)
class FileRecord:
    """Describe one file as it was written."""

    size: int  # bytes
    sha256: str
    whole: bool  # False: the hash is of the first and the last MiB only


@dataclass(slots=True, frozen=True)
class Manifest:
    """List what a checkpoint directory has to hold."""

    step: int
    serial: int
    files: dict[str, FileRecord]  # path relative to the directory, with forward slashes


def describe(directory: Path, step: int, serial: int) -> Manifest:
    """Make the manifest of all files that are in `directory` now. Raises OSError."""
    paths = sorted(Path(parent, name) for parent, _, names in os.walk(directory) for name in names)
    files = {p.relative_to(directory).as_posix(): _record(p) for p in paths if p != directory / MANIFEST}
    return Manifest(step, serial, files)


def write(manifest: Manifest, directory: Path) -> None:
    """Write the manifest into the directory. Raises OSError."""
    body: dict[str, Any] = {"format": FORMAT, **asdict(manifest)}
    (directory / MANIFEST).write_text(json.dumps({**body, "digest": _digest(body)}, indent=1) + "\n", encoding="utf-8")


def read(directory: Path) -> Manifest:
    """Read the manifest of a directory. Raises CheckpointError when there is none that can be trusted."""
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
    """Check every file and return the manifest. Files that it does not list are ignored.

    Raises CheckpointError that names the first file which is missing or differs.
    """
    manifest = read(directory)
    for name, record in manifest.files.items():
        problem = _difference(directory / name, record)
        if problem:
            raise CheckpointError(f"{directory} is damaged: {name} {problem}")
    return manifest


def write_state(state: dict[str, Any], directory: Path) -> None:
    """Write `state` to state.json: None, bool, int, float, str, lists, dicts with string keys. Tuples become lists.

    Floats come back bit for bit, NaN and infinities included. Raises TypeError for what JSON does not have (an array),
    OSError from the disk.
    """
    (directory / STATE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")


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


log = logging.getLogger(__name__)

# `.old`: a save that replaced a checkpoint of the same step was killed before it was done (see `CheckpointDir.commit`).
NAME = re.compile(r"step_(\d{6,})(\.old)?")


@dataclass(slots=True, frozen=True)
class Entry:
    """Name a checkpoint directory whose manifest can be read; its files are not checked yet."""

    path: Path
    manifest: Manifest


def entries(root: Path) -> tuple[list[Entry], list[CheckpointError]]:
    """Return the checkpoints under `root`, newest first, and an error for each directory that is named like one only.

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

    Raises CheckpointError if a file is damaged, and names the checkpoint to use instead, if there is one; also if the
    checkpoint has no state of one of `roles`.
    """
    try:
        verify(path)
        state: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
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


_MODEL = "actor.model_name_or_path"
_ADAPTERS = ("lora.rank", "lora.alpha", "lora.target_modules")
_OF_A_START = ("run_dir", "resume")
"""Keys that may differ from start to start, and do not change the results."""


def changed_keys(earlier: Path, config: Config) -> list[str]:
    """List the keys that differ from the run that wrote the file `earlier`, as `key was -> is`; none without a file."""
    before = stored_keys(earlier)
    now = flat(tomllib.loads(dump_toml(config)))
    return [
        f"{name} {toml_value(before[name])} -> {'not set' if value is None else toml_value(value)}"
        for name, value in (dict.fromkeys(all_keys()) | now).items()
        if name in before and before[name] != value and name not in _OF_A_START
    ]


def refuse_other_adapters(changes: Iterable[str], directory: str = "run_dir") -> None:
    """Raise ConfigError if the adapters, or their weight (lora.alpha), would change.

    `changes`: the result of `changed_keys`; `directory`: the key whose value a new run has to change.
    """
    for change in changes:
        if (key := change.partition(" ")[0]) in _ADAPTERS:
            raise ConfigError(
                f"{change}: the adapters in the checkpoint were trained with the first value, and the second one would "
                f"change the policy at once. Restore {key}, or give another --{directory} for a new run"
            )


def refuse_other_model(before: Mapping[str, str], now: Mapping[str, str], directory: str = "run_dir") -> None:
    """Raise ConfigError if the actor's model has other contents than `before`; both: path -> `model_contents`."""
    if before and set(before.values()) != set(now.values()):
        raise ConfigError(
            f"{_MODEL} is {''.join(now)}, which holds another model than {''.join(before)} did when this run started: "
            "its checkpoint would be trained against another reference. Give the model that it started from, or "
            f"another --{directory} for a new run"
        )
