"""Read and write the entries of eval.datasets: paths, or tables."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from slurm_rlhf.config.keys import Key, all_keys
from slurm_rlhf.config.schema_eval import EvalDataSet

FIELDS = tuple(field.name for field in fields(EvalDataSet))

Check = Callable[[Key, Any], Any]
"""Checks a value against the type of its key: `key_text.from_toml`."""


def field_key(key: Key, name: str) -> Key:
    """Return the key that a field of an entry is like, by the name under which errors tell of it."""
    if name in ("path", "name"):
        return Key(f"{key.name}: {name}", "str", "")
    like = all_keys().get(f"eval.{name}") or all_keys()[f"data.{name}"]
    return Key(f"{key.name}: {name}", like.kind, like.default)


def read_entry(key: Key, value: Any, check: Check) -> EvalDataSet | str:
    """Read one entry; a text says what is wrong with it. Raises what `check` raises for a value of a wrong type."""
    if isinstance(value, EvalDataSet):
        return value
    if isinstance(value, str):
        value = {"path": value}
    if not isinstance(value, dict):
        return f"{key.name} takes {key.expected}, got an entry {value!r}"
    for name in value:
        if name not in FIELDS:
            near = difflib.get_close_matches(name, FIELDS, n=1)
            meant = f"; did you mean {near[0]}?" if near else ""
            return f"{key.name}: a data set has no {name!r}{meant} (valid: {', '.join(FIELDS)})"
    entry = EvalDataSet(**{"path": "", **{name: check(field_key(key, name), inner) for name, inner in value.items()}})
    if not entry.path:
        return f"{key.name}: a data set has no path: name its JSONL file"
    return entry


def entry_table(entry: EvalDataSet) -> dict[str, Any]:
    """Return what a user would write for the entry: the fields that are set."""
    found = {name: getattr(entry, name) for name in FIELDS}
    return {name: value for name, value in found.items() if value is not None and (name, value) != ("name", "")}


def resolved_entry(entry: EvalDataSet, base: Path) -> EvalDataSet:
    """Return the entry with an absolute path, which starts at `base`."""
    return replace(entry, path=os.path.abspath(base / Path(entry.path).expanduser()))
