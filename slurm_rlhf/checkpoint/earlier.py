"""Compares a run or a stage with the one that wrote the checkpoint it goes on from: its keys, and its model."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.text import dump_toml, flat, toml_value
from slurm_rlhf.errors import ConfigError

_MODEL = "actor.model_name_or_path"
_SCALE = "lora.alpha"
_OF_A_START = ("run_dir", "resume")
"""Keys that say where a run is, and do not change its results."""


def changed_keys(earlier: Path, config: Config) -> list[str]:
    """List the keys that differ from the run that wrote the file `earlier`, as `key was -> is`; none without a file."""
    try:
        before = flat(tomllib.loads(earlier.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return []
    now = flat(tomllib.loads(dump_toml(config)))
    return [
        f"{name} {toml_value(before[name])} -> {toml_value(value)}"
        for name, value in now.items()
        if name in before and before[name] != value and name not in _OF_A_START
    ]


def refuse_other_scale(changes: Iterable[str], directory: str = "run_dir") -> None:
    """Raise ConfigError if the adapters would count more or less than before.

    `changes`: of `changed_keys`; `directory`: the key of what a new run needs another of.
    """
    for change in changes:
        if change.startswith(f"{_SCALE} "):
            raise ConfigError(
                f"{change}: the adapters in the checkpoint were trained with the first value, and with the other one "
                f"the policy would be another at once. Restore {_SCALE}, or give another --{directory} for a new "
                "run"
            )


def refuse_other_model(before: Mapping[str, str], now: Mapping[str, str], directory: str = "run_dir") -> None:
    """Raise ConfigError if the actor's model has other contents than `before`; both: path -> `model_contents`."""
    if before and set(before.values()) != set(now.values()):
        raise ConfigError(
            f"{_MODEL} is {''.join(now)}, which holds another model than {''.join(before)} did when this run started: "
            "its checkpoint would be trained against another reference. Give the model that it started from, or "
            f"another --{directory} for a new run"
        )
