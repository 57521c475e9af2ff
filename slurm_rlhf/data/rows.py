"""Read the rows of a data set: JSONL, CSV, Parquet, and what the library `datasets` saves."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from slurm_rlhf.config.data_files import COLUMNAR, data_files
from slurm_rlhf.errors import ConfigError, DataError, cut

Row = dict[str, Any] | DataError
"""The columns of a row, or the error that says what is wrong with it."""


def read_rows(path: Path, max_rows: int = 0) -> Iterator[tuple[str, Row]]:
    """Yield where each row of a data set stands, and the row: at most `max_rows` (0: all).

    `path` is a file, a pattern or a directory, as `data_files` takes it. Blank lines are no rows; the values of a CSV
    file are text, those of its first line the columns. Raises DataError for a file that cannot be read at all,
    ConfigError where pyarrow is missing.
    """
    return islice((row for file in data_files(path) for row in _reader(file)), max_rows or None)


def _reader(file: Path) -> Iterator[tuple[str, Row]]:
    if file.suffix in COLUMNAR:
        return _columnar(file)
    return _csv(file) if file.suffix == ".csv" else _jsonl(file)


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
    """Raise DataError if no row has `column`, or every row is broken: then it is the job that is wrong, not a row."""
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
    except RecursionError:
        return DataError(f"{where}: nested too deeply")
    except ValueError as error:  # Python reads no integer of more than 4300 digits
        return DataError(f"{where}: not a number that can be read: {error}")
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
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}:{number}", _parsed(line, number, f"{path}:{number}")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


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
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
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
            batches = ParquetFile(file).iter_batches() if path.suffix == ".parquet" else ipc.open_stream(file)
            rows = (row for batch in batches for row in batch.to_pylist())
            yield from ((f"{path}: row {number}", row) for number, row in enumerate(rows))
    except (OSError, ArrowException) as error:
        raise DataError(f"{path}: no {path.suffix[1:].capitalize()} file that can be read: {error}") from None
