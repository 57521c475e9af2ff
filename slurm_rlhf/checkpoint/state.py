"""The conductor's own state as JSON: exactly what was given comes back, or the save fails at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slurm_rlhf.errors import CheckpointError

STATE = "state.json"


def write_state(state: dict[str, Any], directory: Path) -> None:
    """Write `state` to state.json: None, bool, int, float, str, lists, dicts with string keys. Tuples become lists.

    Floats come back bit for bit, NaN and infinities included. Raises TypeError that names the entry which JSON would
    change or refuse (an array, a dict with integer keys), OSError from the disk.
    """
    _check(state, "state")
    (directory / STATE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")


def read_state(directory: Path) -> dict[str, Any]:
    """What `write_state` wrote. Raises CheckpointError."""
    try:
        state = json.loads((directory / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory} is damaged: its {STATE} cannot be read ({error})") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{directory} is damaged: its {STATE} holds no object")
    return state


def _check(value: Any, where: str) -> None:
    if isinstance(value, dict):
        for key, entry in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}; JSON would turn it into a string: make it one")
            _check(entry, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            _check(entry, f"{where}[{index}]")
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise TypeError(f"{where} is a {type(value).__name__}; make it a number, a string, a list or a dict")
