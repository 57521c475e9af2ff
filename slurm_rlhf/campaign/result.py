"""What a campaign found: the summary, and campaign.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from slurm_rlhf.campaign.faults import Fault
from slurm_rlhf.campaign.page import page, sums
from slurm_rlhf.campaign.verdicts import OUTCOMES, Row
from slurm_rlhf.run_directory import write_atomically

JSON, PAGE = "campaign.json", "campaign.html"


@dataclass(frozen=True, slots=True)
class Campaign:
    """Holds the rows of a campaign, and the faults that this machine could not run with the reason."""

    seed: int
    rows: Sequence[Row]
    not_run: Sequence[tuple[str, str]] = ()
    seconds: float = 0.0
    note: str = ""  # the time-outs of the runs

    @property
    def good(self) -> bool:
        return all(row.good for row in self.rows)

    def summary(self) -> list[str]:
        """Return the figures, a line each."""
        rows = self.rows
        outcomes = ", ".join(f"{count} {name}" for name in OUTCOMES if (count := sum(r.outcome == name for r in rows)))
        times = [row.detected_s for row in rows if row.detected_s is not None]
        killed = [row.detected_s for row in rows if row.kind == "SIGKILL" and row.detected_s is not None]
        asked = [row for row in rows if row.culprit is not None]
        compared = [row for row in rows if row.equal is not None]
        lines = [
            f"{len(rows)} faults, seed {self.seed}, {self.seconds:.0f} s: {outcomes or 'none'}",
            f"detected: slowest {_most(times)}, of SIGKILL {_most(killed)}",
            f"culprit named: {sum(bool(row.culprit) for row in asked)} of {len(asked)}",
            f"metrics equal to the calm run's: {sum(bool(row.equal) for row in compared)} of {len(compared)}, over "
            f"{sum(row.compared for row in rows)} steps",
            f"left behind: {sum(len(row.left) for row in rows)} processes, files in /dev/shm and locks",
            f"as it should be: {sum(row.good for row in rows)} of {len(rows)}",
        ]
        if self.not_run:
            lines.append(f"not run here: {len(self.not_run)} ({'; '.join(sorted({why for _, why in self.not_run}))})")
        return lines

    def write(self, directory: Path) -> None:
        """Write campaign.json and the page into `directory`. Raises OSError."""
        parts = {
            "kinds": [asdict(one) for one in sums(self.rows, lambda row: row.kind)],
            "phases": [asdict(one) for one in sums(self.rows, lambda row: row.phase)],
        }
        content = {"good": self.good, "summary": self.summary()} | parts | asdict(self)
        write_atomically(directory / JSON, json.dumps(content, indent=1) + "\n")
        title = f"fault campaign, seed {self.seed}"
        write_atomically(directory / PAGE, page(title, self.summary(), self.rows, self.not_run, self.note))


def _most(seconds: Sequence[float]) -> str:
    return f"{max(seconds):.1f} s" if seconds else "-"


def left_out(faults: Sequence[Fault], reasons: dict[str, str]) -> list[tuple[str, str]]:
    """Name the faults that are not run, each with the reason of what it needs."""
    return [(fault.name, reasons[fault.needs]) for fault in faults]
