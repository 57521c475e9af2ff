"""Read the rows of a JSONL or Parquet file where a row that is wrong must not end the job: it becomes its own error."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from slurm_rlhf.data.prompts import parse_line
from slurm_rlhf.errors import ConfigError, DataError

Row = dict[str, Any] | DataError
"""What a row holds, or what is wrong with it."""

PARQUET = ".parquet"


def read_rows(path: Path, max_rows: int = 0) -> list[Row]:
    """Read at most `max_rows` rows (0: all) of a file; blank lines are no rows.

    Raises DataError for a file that cannot be read at all or holds no rows, ConfigError where pyarrow is missing.
    """
    found = _parquet(path) if path.suffix == PARQUET else _jsonl(path)
    rows = list(islice(found, max_rows) if max_rows else found)
    if not rows:
        raise DataError(f"{path}: the file holds no rows")
    return rows


def require_column(rows: list[Row], column: str, path: Path) -> None:
    """Raise DataError if no row has `column`, or every row is broken: then it is the job that is wrong, not a row."""
    whole = [row for row in rows if not isinstance(row, DataError)]
    if not whole:
        raise DataError(f"no row can be read; the first: {rows[0]}")
    if not any(column in row for row in whole):
        columns = ", ".join(whole[0]) or "none"
        raise DataError(
            f"{path}: no row has a column {column!r} (columns: {columns}): set data.input_key to one of them"
        )


def _jsonl(path: Path) -> Iterator[Row]:
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _parsed(line, number, path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def _parsed(line: bytes, number: int, path: Path) -> Row:
    try:
        return parse_line(line, number, path)
    except DataError as error:
        return error


def _parquet(path: Path) -> Iterator[Row]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ConfigError(
            f"{path}: reading Parquet needs pyarrow, which is not installed: pip install 'slurm_rlhf[parquet]' (or "
            "pip install pyarrow), or write the rows as JSONL"
        ) from None
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except (OSError, ArrowException) as error:
        raise DataError(f"{path}: not a Parquet file that can be read: {error}") from None
