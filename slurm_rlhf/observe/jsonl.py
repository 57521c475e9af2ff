"""Files with one JSON object a line: written a line at a time, read also where a kill or a cut has shortened a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slurm_rlhf.run_directory import write_atomically


def append_line(path: Path, row: dict[str, Any]) -> None:
    """Write one line. The operating system has it when this returns. Raises OSError; ValueError for NaN."""
    line = json.dumps(row, ensure_ascii=False, allow_nan=False)
    with path.open("a", encoding="utf-8", errors="replace") as file:
        file.write(line + "\n")


def whole_lines(text: str, key: str = "step") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (line, row) for each whole line that has `key`. Only a newline ends a line, whatever a string holds."""
    for line in text.split("\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and key in row:
            yield line, row


def read_rows(path: Path, key: str = "step") -> list[dict[str, Any]]:
    """Read all whole lines of a file; none where it is missing, cannot be read, or is no file, such as /dev/full."""
    if not path.is_file():
        return []
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return [row for _, row in whole_lines(text, key)]


def truncate_after(path: Path, step: int) -> int:
    """Drop the lines after `step`, which a resumed run writes again, and any half line; return how many lines.

    The lines that stay keep every byte.
    """
    if not path.is_file():
        return 0
    lines = list(whole_lines(path.read_text(encoding="utf-8", errors="replace")))
    kept = [line for line, row in lines if row["step"] <= step]
    write_atomically(path, "".join(line + "\n" for line in kept), durable=True)
    return len(lines) - len(kept)
