"""Run the user's Python files that `train.plugins` names: each registers algorithms or rewards."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurm_rlhf.errors import ConfigError
from slurm_rlhf.user_files import run_file

KEY = "train.plugins"

_LOADED: dict[str, str] = {}
"""Path -> hash of the text that this process ran."""


def load_plugins(files: Sequence[str]) -> dict[str, str]:
    """Run each file once in this process; returns a hash of each by its path.

    Raises ConfigError for a file that is not there, or that raises: with its line, and what to do.
    """
    for name in files:
        if name not in _LOADED:
            _LOADED[name] = _load(Path(name))
    return {name: _LOADED[name] for name in files}


def _load(file: Path) -> str:
    if not file.is_file():
        what = "is a directory, not a file" if file.is_dir() else "no such file"
        raise ConfigError(f"{KEY}: {what}: {file}: name a Python file that calls slurm_rlhf.register_algorithm(...)")
    text = file.read_bytes()
    run_file(file, KEY, ConfigError, f". Correct the file, or take it out of {KEY}")
    return hashlib.sha256(text).hexdigest()[:16]


def changed_plugins(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Say which plugins differ from those that a checkpoint was written with; nothing if none does.

    A plugin that was only moved is the same one: contents are compared.
    """
    lost, new = set(before.values()) - set(now.values()), set(now.values()) - set(before.values())
    old_names = [Path(name).name for name, digest in before.items() if digest in lost]
    new_names = [Path(name).name for name, digest in now.items() if digest in new]
    changed = [name for name in old_names if name in new_names]
    told = [f"{name} has changed" for name in changed]
    told += [f"{name} is gone" for name in old_names if name not in changed]
    return told + [f"{name} is new" for name in new_names if name not in changed]
