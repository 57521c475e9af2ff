"""Files with one JSON object a line: written a line at a time, read also where a kill or a cut has shortened a line."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

from slurm_rlhf.run_directory import write_atomically

_BLOCK = 1 << 16


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
    try:
        return list(iterate_rows(path, key))
    except OSError:
        return []


def iterate_rows(path: Path, key: str = "step", wanted: Container[int] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the whole lines of a file as `read_rows` does, with one line in memory at a time. Raises OSError.

    `wanted`: the numbers of the lines to read, from 0 on; None: all.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file):
            if wanted is None or number in wanted:
                for _, row in whole_lines(line.decode("utf-8", "replace").removesuffix("\n"), key):
                    yield {sys.intern(name): value for name, value in row.items()}  # rows share the names


def count_lines(path: Path) -> int:
    """Count the lines of a file; 0 where it is missing or cannot be read."""
    if not path.is_file():
        return 0
    try:
        with path.open("rb") as file:
            return sum(1 for _ in file)
    except OSError:
        return 0


def drop_end(path: Path, step: int) -> None:
    """Drop the lines from `step` on, and any half line, at the end of a file: they are written anew. Raises OSError.

    It reads little more than those: what it costs does not grow with the run, as that of `truncate_after` does.
    """
    if not path.is_file():
        return
    with path.open("r+b") as file:
        end, size = file.seek(0, os.SEEK_END), _BLOCK
        while True:
            begin = max(0, end - size)
            file.seek(begin)
            tail = file.read()
            if begin:
                tail = tail[tail.find(b"\n") + 1 :]  # its first line is cut
            dropped = 0
            for line in reversed(tail.splitlines(keepends=True)):
                if any(row["step"] < step for _, row in whole_lines(line.decode(errors="replace"))):
                    file.truncate(end - dropped)
                    return
                dropped += len(line)
            if not begin:
                file.truncate(0)
                return
            size *= 4


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
