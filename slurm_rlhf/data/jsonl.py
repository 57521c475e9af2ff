"""Read JSONL files: one JSON object on each line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slurm_rlhf.errors import DataError


def read_jsonl(path: Path | str, max_rows: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, object) for each line that is not blank, at most `max_rows` of them (0: all).

    Raises DataError with file and line for a line that is not UTF-8, not JSON, or not an object.
    """
    rows = 0
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                if max_rows and rows == max_rows:
                    return
                rows += 1
                yield number, _parse(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line, f"{path}:{number}")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8").rstrip())
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 text (byte {error.start} of the line)") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not valid JSON: {error.msg} at column {error.colno}{_hint(line)}") from None
    except RecursionError:
        raise DataError(f"{where}: nested too deeply") from None
    if not isinstance(row, dict):
        raise DataError(f"{where}: a JSON object is needed, got {_shown(row)}{_hint(line)}")
    return row


def _hint(line: bytes) -> str:
    if line.strip()[:1] == b"[" or line.strip() == b"{":
        return " (this looks like plain JSON; JSONL has one whole object on each line)"
    return ""


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
