"""Read the rows of a data set: JSONL, CSV, Parquet, and what `datasets` saves, by `data.map` and `data.filter`."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from slurm_rlhf.config.rule import SIGNS
from slurm_rlhf.config.schema import Data
from slurm_rlhf.config.user_data import COLUMNAR, condition, data_files, parts
from slurm_rlhf.errors import ConfigError, DataError, cut

Row = dict[str, Any] | DataError
"""The columns of a row, or the error that says what is wrong with it."""


def read_rows(path: Path, max_rows: int = 0, data: Data | None = None) -> Iterator[tuple[str, Row]]:
    """Yield (position for errors, row) for each row of a data set, at most `max_rows` (0: all).

    `path` is a file, a pattern or a directory, as `user_data.data_files` takes it, or several by comma. Blank lines are
    no rows; the values of a CSV file are text, those of its first line the columns. With `data` columns are renamed,
    rows filtered and data sets mixed as it says. Raises DataError for a file that cannot be read at all, and for files
    with unlike columns; ConfigError if pyarrow is missing, or weights and data sets differ in number.
    """
    sets, columns = parts(path), Columns(data or Data())
    if not (data and data.weights) or len(sets) == 1:
        return islice((row for part in sets for row in _chosen(part, columns)), max_rows or None)
    if len(data.weights) != len(sets):
        raise ConfigError(
            f"data.weights has {len(data.weights)} numbers, and {path} joins {len(sets)} data sets by commas: give "
            "each its weight"
        )
    return islice(_mixed([list(_chosen(part, columns)) for part in sets], data.weights), max_rows or None)


def _chosen(part: str, columns: Columns) -> Iterator[tuple[str, Row]]:
    """Yield the rows of one data set that pass data.filter, with columns renamed by data.map."""
    for file in data_files(part):
        try:
            yield from _of_file(file, columns)
        except OSError as error:
            raise DataError(f"{file}: cannot be read: {error.strerror}") from None


def _of_file(file: Path, columns: Columns) -> Iterator[tuple[str, Row]]:
    first = True
    read = _columnar if file.suffix in COLUMNAR else {".csv": _csv, ".json": _json}.get(file.suffix, _jsonl)
    for where, row in read(file):
        if isinstance(row, DataError):
            yield where, row
            continue
        found = columns.renamed(row, filled=read is _columnar)
        if first:
            columns.compare(file, found)
            first = False
        try:
            if columns.takes(found, where):
                yield where, found
        except DataError as error:
            yield where, error


def _mixed(sets: list[list[tuple[str, Row]]], weights: list[float]) -> Iterator[tuple[str, Row]]:
    """Mix rows in the shares of the weights, each at most once, spread evenly: any part has about these shares."""
    total = min(len(rows) / weight for rows, weight in zip(sets, weights, strict=True) if weight)
    counts = [min(round(total * weight), len(rows)) for rows, weight in zip(sets, weights, strict=True)]
    order = sorted(
        ((number + 0.5) / count, place, number) for place, count in enumerate(counts) for number in range(count)
    )
    return (sets[place][number * len(sets[place]) // counts[place]] for _, place, number in order)


def cell(row: Row, column: str, key: str, where: str) -> Any:
    """Return the value of the column that `key` of the configuration names. Raises DataError if there is none."""
    if isinstance(row, DataError):
        raise row
    if column not in row:
        raise DataError(
            f"{where}: no column {column!r} (columns: {', '.join(row) or 'none'}): fix the row or set {key}"
        )
    return row[column]


def require_column(rows: list[tuple[str, Row]], column: str, path: Path) -> None:
    """Raise DataError if no row has `column`, or every row is broken: then the settings are wrong, not single rows."""
    if not rows:
        raise DataError(f"{path}: the file holds no rows")
    whole = [row for _, row in rows if not isinstance(row, DataError)]
    if not whole:
        raise DataError(f"no row can be read; the first: {rows[0][1]}")
    if not any(column in row for row in whole):
        columns = ", ".join(whole[0]) or "none"
        raise DataError(
            f"{path}: no row has a column {column!r} (columns: {columns}): set data.input_key to one of them"
        )


def _parsed(line: bytes, number: int, where: str) -> Row:
    """Read line `number` (from 1) of a JSONL file, which has to be UTF-8, JSON, and an object."""
    try:
        row = json.loads(line.removeprefix(b"\xef\xbb\xbf" if number == 1 else b"").decode("utf-8").rstrip())
    except UnicodeDecodeError as error:
        return DataError(f"{where}: not UTF-8 text (byte {error.start} of the line)")
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")
        return DataError(f"{where}: not valid JSON: {what} at column {error.colno}{_hint(line)}")
    except (RecursionError, ValueError) as error:  # Python reads no integer of more than 4300 digits
        return DataError(f"{where}: not JSON that can be read: {error}")
    if isinstance(row, dict):
        return row
    return DataError(
        f"{where}: a JSON object is needed, got {cut(json.dumps(row, ensure_ascii=False), 60)}{_hint(line)}"
    )


def _hint(line: bytes) -> str:
    if line.strip()[:1] == b"[" or line.strip() == b"{":
        return " (this looks like plain JSON; JSONL has one whole object on each line)"
    return ""


def _jsonl(path: Path) -> Iterator[tuple[str, Row]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield f"{path}:{number}", _parsed(line, number, f"{path}:{number}")


def _json(path: Path) -> Iterator[tuple[str, Row]]:
    """Read a JSON array of rows; a file without one is read as JSONL."""
    try:
        text = path.read_bytes().removeprefix(b"\xef\xbb\xbf").strip()
        rows = json.loads(text) if text.startswith(b"[") else None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON that can be read: {error}") from None
    if rows is None:
        yield from _jsonl(path)
    for number, row in enumerate(rows or ()):
        where = f"{path}: row {number}"
        yield where, row if isinstance(row, dict) else DataError(f"{where}: a JSON object is needed")


def _csv(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file, strict=True)
            for row in rows:
                where = f"{path}:{rows.line_num}"
                if None in row or None in row.values():
                    yield where, DataError(f"{where}: the row has another number of values than the first line")
                else:
                    yield where, row
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a CSV file in UTF-8 that can be read: {error}") from None


def _columnar(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        from pyarrow import ArrowException, ipc
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ConfigError(
            f"{path}: reading {path.suffix[1:].capitalize()} needs pyarrow, which is not installed: pip install "
            "'slurm_rlhf[data]' (or pip install pyarrow), or write the rows as JSONL"
        ) from None
    try:
        with open(path, "rb") as file:
            batches = ParquetFile(file).iter_batches(4096) if path.suffix == ".parquet" else ipc.open_stream(file)
            rows = (row for batch in batches for row in batch.to_pylist())
            yield from ((f"{path}: row {number}", row) for number, row in enumerate(rows))
    except (OSError, ArrowException) as error:
        raise DataError(f"{path}: no {path.suffix[1:].capitalize()} file that can be read: {error}") from None


KEYS = ("input_key", "label_key", "output_key", "chosen_key", "rejected_key")
"""Keys of the group data that name columns."""


class Columns:
    """Applies data.map and data.filter to rows, and compares the columns of files."""

    def __init__(self, data: Data) -> None:
        """Raises ConfigError for an entry that cannot be read."""
        self._names = _read("data.map", data.map)
        self._conditions = _read("data.filter", data.filter)
        self._tools = data.tools_key
        self._used = {getattr(data, key): f"data.{key}" for key in KEYS}
        self._first: tuple[Path, set[str]] | None = None

    def renamed(self, row: dict[str, Any], filled: bool = False) -> dict[str, Any]:
        """Return the row with columns renamed by data.map; an entry whose column the row lacks does nothing.

        Messages get the form that chat templates take. `filled`: the file gives each message and tool the keys of all
        others, with null values, as Parquet does; these keys are removed.
        """
        if filled:
            row = {name: _present(each) if name == self._tools or _said(each) else each for name, each in row.items()}
        row = {name: _messages(value) if _said(value) else value for name, value in row.items()}
        found = {name: value for name, _, column in self._names if (value := _value(row, column)) is not _MISSING}
        moved = {column for name, _, column in self._names if name in found}
        return {name: value for name, value in row.items() if name not in moved} | found

    def takes(self, row: dict[str, Any], where: str) -> bool:
        """Tell whether all of data.filter hold. Raises DataError for a column that is missing or is no number."""
        return all(_holds(row, *entry, where) for entry in self._conditions)

    def compare(self, file: Path, row: dict[str, Any]) -> None:
        """Raise DataError if the first row of a file has other columns, of those that keys name, than earlier files."""
        here = self._used.keys() & row.keys()
        first, before = self._first = self._first or (file, here)
        for lacks, has, missing in ((file, first, before - here), (first, file, here - before)):
            if missing:
                column = min(missing)
                raise DataError(
                    f"{lacks} has no column {column!r} ({self._used[column]}), and {has} has one: the files of a data "
                    "set need the same columns. Rename what differs by data.map, or leave a file out"
                )


_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}
"""Roles in the files of ShareGPT -> those of chat templates."""


def _said(value: Any) -> bool:
    """Tell whether a value is a list of messages."""
    needed: tuple[set[str], ...] = ({"role"}, {"from", "value"})
    dicts = isinstance(value, list) and all(isinstance(one, dict) for one in value)
    return dicts and all(any(keys <= one.keys() for keys in needed) for one in value)


def _messages(value: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with role and content; parts of a content are joined to one text, keys without values removed."""
    found = []
    for one in value:
        named = one if "role" in one else {"role": _ROLES.get(one["from"], one["from"]), "content": one.get("value")}
        message = {key: each for key, each in named.items() if each is not None or key == "content"}
        parts = message.get("content")
        if isinstance(parts, list) and all(isinstance(part, dict) and "text" in part for part in parts):
            message["content"] = "".join(part["text"] for part in parts)
        found.append(message)
    return found


def _present(value: Any) -> Any:
    """Return a value without keys whose value is None, except the content of a message."""
    if isinstance(value, dict):
        return {key: _present(each) for key, each in value.items() if each is not None or key == "content"}
    return [_present(each) for each in value] if isinstance(value, list) else value


_MISSING = object()


def _read(key: str, entries: list[str]) -> list[tuple[str, str, str]]:
    found = [condition(entry) for entry in entries]
    if None in found:
        raise ConfigError(f"{key}: {entries[found.index(None)]!r} cannot be read")
    return [entry for entry in found if entry is not None]


def _value(row: dict[str, Any], column: str) -> Any:
    """Return the value of a column; `column.name` is a value inside it."""
    found: Any = row
    for name in [column] if column in row else column.split("."):
        found = found.get(name, _MISSING) if isinstance(found, dict) else _MISSING
    return found


def _holds(row: dict[str, Any], column: str, sign: str, text: str, where: str) -> bool:
    value = _value(row, column)
    if value is _MISSING:
        names = ", ".join(row) or "none"
        raise DataError(f"{where}: no column {column!r} (columns: {names}): fix the row, or correct data.filter")
    found = None if isinstance(value, bool) else number(value)
    if sign[0] in "<>":
        if found is None:
            shown = cut(repr(value), 40)
            raise DataError(f"{where}: {column!r} is {shown}, and data.filter compares it with a number ({sign}{text})")
        return bool(SIGNS[sign](found, float(text)))
    written = str(value).lower() if isinstance(value, bool) else "" if value is None else str(value)
    return (written == text or (found is not None and found == number(text))) == (sign == "=")


def number(value: Any) -> float | None:
    """Return a value as a number; None: it is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
