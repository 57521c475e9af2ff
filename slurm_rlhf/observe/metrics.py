"""metrics.jsonl: one JSON object per training step."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Where it is the clock that decides; everything else is equal bit for bit in two runs under full determinism.
TIMED = ("time/", "perf/")


class MetricsLog:
    """Append-only. `step` comes first in a line, then the other metrics by name, timings last.

    Floats are written as their shortest exact representation, so that equal lines mean equal numbers, bit for bit.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, step: int, metrics: dict[str, float]) -> None:
        """One line; it is on its way to the disk when this returns, so that a killed run does not lose it."""
        ordered = {name: metrics[name] for name in sorted(metrics, key=lambda name: (name.startswith(TIMED), name))}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **ordered}) + "\n")

    def rows(self) -> Iterator[dict[str, Any]]:
        """All whole lines; a last line that a kill cut short is passed over."""
        if not self._path.exists():
            return
        for line in self._path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                continue

    def truncate_after(self, step: int) -> int:
        """Drop the lines behind `step`, which a resumed run writes again; returns how many went."""
        rows = list(self.rows())
        kept = [row for row in rows if row["step"] <= step]
        if not self._path.exists():
            return 0
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        os.replace(temporary, self._path)
        return len(rows) - len(kept)
