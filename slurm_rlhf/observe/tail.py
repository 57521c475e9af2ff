"""The last lines of a log file, for error reports."""

from __future__ import annotations

from pathlib import Path

_READ = 1 << 16  # bytes from the end that are looked at


def tail(path: Path, lines: int) -> list[str]:
    """The last `lines` lines of `path` that are not blank; what can be said where there is no such file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _READ))
            text = file.read().decode("utf-8", errors="replace")
    except OSError as error:
        return [f"({path} cannot be read: {error.strerror})"]
    found = [line.rstrip() for line in text.splitlines() if line.strip()]
    return found[-lines:] or ["(it is empty)"]
