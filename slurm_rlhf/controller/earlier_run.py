"""What a run was like when it wrote the checkpoint that it goes on from: the keys that differ, and the model."""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path
from typing import Any

from slurm_rlhf.config.key_text import dump_toml, toml_value
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ConfigError

_MODEL = "actor.model_name_or_path"
_OF_A_START = ("run_dir", "resume")
"""Keys that say where a run is, and not what it does."""
_HASHED = 1 << 20  # bytes of the beginning of each file of a model


def changed_keys(earlier: Path, config: Config) -> list[str]:
    """List the keys that differ from the run that wrote the file `earlier`, as `key was -> is`; none without a file."""
    try:
        before = _flat(tomllib.loads(earlier.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return []
    now = _flat(tomllib.loads(dump_toml(config)))
    return [
        f"{name} {toml_value(before[name])} -> {toml_value(value)}"
        for name, value in now.items()
        if name in before and before[name] != value and name not in _OF_A_START
    ]


def refuse_other_model(earlier: Path, config: Config) -> None:
    """Raise ConfigError where the run that wrote `earlier` started from a model of other contents, if it is there."""
    try:
        before = Path(_flat(tomllib.loads(earlier.read_text(encoding="utf-8")))[_MODEL])
    except (OSError, ValueError, KeyError):
        return
    now = Path(config.actor.model_name_or_path)
    if before != now and before.is_dir() and _contents(before) != _contents(now):
        raise ConfigError(
            f"{_MODEL} is {now}, and the run in {earlier.parent} started from {before}, which holds another model: its "
            "checkpoint would be trained against another reference. Give the model that it started from, or another "
            "--run_dir for a new run"
        )


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Name the values of nested tables by dotted keys."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def _contents(model: Path) -> list[tuple[str, int, str]]:
    """List the files of weights and config.json, with sizes and hashes of their beginnings."""
    found = []
    for path in sorted([*model.glob("*.safetensors"), *model.glob("*.bin"), *model.glob("config.json")]):
        with path.open("rb") as file:
            found.append((path.name, path.stat().st_size, hashlib.blake2b(file.read(_HASHED)).hexdigest()))
    return found
