"""Where a run stands, as its directory tells it: without a word from the run itself."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_READ = 1 << 18  # bytes from the end of metrics.jsonl
_WINDOW = 20  # steps that the estimate looks back


@dataclass(frozen=True, slots=True)
class Standing:
    """`status` is that of summary.json, empty where there is none."""

    status: str
    step: int
    total: int
    reward: float | None
    step_s: float | None  # mean of the last steps
    age_s: float | None  # since the last step
    error: str

    @property
    def left_s(self) -> float | None:
        """Seconds that the steps that are left take; None while nothing is known."""
        return None if self.step_s is None else (self.total - self.step) * self.step_s


def read_standing(metrics: Path, summary: Path) -> Standing:
    """What the two files say; a file that is missing or half written says nothing."""
    told = _summary(summary)
    rows = _last_rows(metrics)
    last: dict[str, Any] = rows[-1] if rows else {}
    seconds = [row["time/step"] for row in rows if row.get("time/step") is not None][-_WINDOW:]
    return Standing(
        status=str(told.get("status", "")),
        step=max(int(last.get("step", 0)), int(told.get("steps", 0))),
        total=int(told.get("total_steps", 0)),
        reward=last.get("reward"),
        step_s=sum(seconds) / len(seconds) if seconds else None,
        age_s=max(0.0, time.time() - metrics.stat().st_mtime) if rows else None,
        error=str(told.get("error", "")),
    )


def _summary(path: Path) -> dict[str, Any]:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


def _last_rows(path: Path) -> list[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _READ))
            lines = file.read().splitlines()
    except OSError:
        return []
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue  # cut off by a kill, or by where this began to read
        if isinstance(row, dict) and "step" in row:
            rows.append(row)
    return rows
