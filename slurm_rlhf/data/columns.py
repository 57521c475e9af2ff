"""Rename the columns of rows, and choose rows by them: `data.map` and `data.filter`."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurm_rlhf.config.data_files import condition
from slurm_rlhf.config.schema import Data
from slurm_rlhf.errors import ConfigError, DataError, cut

_SIGNS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_KEYS = ("input_key", "label_key", "output_key", "chosen_key", "rejected_key")
"""Keys of the group data that name columns."""


class Columns:
    """Applies data.map and data.filter to rows, and compares the columns of files."""

    def __init__(self, data: Data) -> None:
        """Raises ConfigError for an entry that cannot be read."""
        self._names = _read("data.map", data.map)
        self._conditions = _read("data.filter", data.filter)
        self._used = {getattr(data, key): f"data.{key}" for key in _KEYS}
        self._first: tuple[Path, set[str]] | None = None

    def renamed(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the row with the names of data.map; a column that is not there is left out."""
        if not self._names:
            return row
        found = {name: value for name, _, column in self._names if (value := _value(row, column)) is not _MISSING}
        moved = {column for name, _, column in self._names if name in found}
        return {name: value for name, value in row.items() if name not in moved} | found

    def takes(self, row: dict[str, Any], where: str) -> bool:
        """Tell whether all of data.filter hold. Raises DataError for a column that is missing or is no number."""
        return all(_holds(row, *entry, where) for entry in self._conditions)

    def compare(self, file: Path, row: dict[str, Any]) -> None:
        """Raise DataError if the first row of a file has others of the columns that keys name than earlier files."""
        here = self._used.keys() & row.keys()
        first, before = self._first = self._first or (file, here)
        for lacks, has, missing in ((file, first, before - here), (first, file, here - before)):
            if missing:
                column = min(missing)
                raise DataError(
                    f"{lacks} has no column {column!r} ({self._used[column]}), and {has} has one: the files of a data "
                    "set need the same columns. Rename what differs by data.map, or leave a file out"
                )


_MISSING = object()


def _read(key: str, entries: list[str]) -> list[tuple[str, str, str]]:
    found = [condition(entry) for entry in entries]
    if None in found:
        raise ConfigError(f"{key}: {entries[found.index(None)]!r} cannot be read")
    return [entry for entry in found if entry is not None]


def _value(row: dict[str, Any], column: str) -> Any:
    """Return the value of a column, or of one inside it behind a dot."""
    found: Any = row
    for name in [column] if column in row else column.split("."):
        found = found.get(name, _MISSING) if isinstance(found, dict) else _MISSING
    return found


def _holds(row: dict[str, Any], column: str, sign: str, text: str, where: str) -> bool:
    value = _value(row, column)
    if value is _MISSING:
        names = ", ".join(row) or "none"
        raise DataError(f"{where}: no column {column!r} (columns: {names}): fix the row, or correct data.filter")
    number = None if isinstance(value, bool) else _number(value)
    if sign in _SIGNS:
        if number is None:
            shown = cut(repr(value), 40)
            raise DataError(f"{where}: {column!r} is {shown}, and data.filter compares it with a number ({sign}{text})")
        return _SIGNS[sign](number, float(text))
    written = str(value).lower() if isinstance(value, bool) else "" if value is None else str(value)
    return (written == text or (number is not None and number == _number(text))) == (sign == "=")


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
