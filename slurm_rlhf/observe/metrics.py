"""Write and read metrics.jsonl: one JSON object per training step."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slurm_rlhf.run_directory import write_atomically

# Metrics that depend on the clock; all others are equal bit for bit in two runs under full determinism.
TIMED = ("time/", "perf/")


class MetricsLog:
    """Append a line per step: `step` comes first, then the other metrics by name, timings last.

    Floats are written as their shortest exact representation (Python's repr), so that equal lines mean equal numbers,
    bit for bit. NaN and infinities, which JSON lacks, become null.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, step: int, metrics: dict[str, float]) -> None:
        """Write one line. The operating system has it when this returns, so a killed run does not lose it."""
        names = sorted(metrics, key=lambda name: (name.startswith(TIMED), name))
        line = json.dumps({"step": step, **{name: finite(metrics[name]) for name in names}}, allow_nan=False)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield all whole lines; one that a kill cut short is skipped."""
        return (row for _, row in self._lines())

    def truncate_after(self, step: int) -> int:
        """Drop the lines after `step`, which a resumed run writes again, and any half line; return how many steps.

        The lines that stay keep every byte.
        """
        if not self._path.exists():
            return 0
        lines = list(self._lines())
        kept = [line for line, row in lines if row["step"] <= step]
        write_atomically(self._path, "".join(line + "\n" for line in kept), durable=True)
        return len(lines) - len(kept)

    def _lines(self) -> Iterator[tuple[str, dict[str, Any]]]:
        if self._path.exists():
            yield from whole_lines(self._path.read_text(encoding="utf-8", errors="replace"))


def whole_lines(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (line, row) for each whole line of metrics.jsonl; lines that a kill or a cut has shortened are skipped."""
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and "step" in row:
            yield line, row


def finite(value: float | None) -> float | int | None:
    """Convert to a plain Python number for JSON, None if JSON cannot hold it. Accepts NumPy scalars as well."""
    if value is None:
        return None
    plain = value if isinstance(value, int) else float(value)
    return plain if math.isfinite(plain) else None
