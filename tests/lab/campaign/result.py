"""What a campaign found: the summary, and campaign.json."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from campaign.faults import Fault
from campaign.verdicts import OUTCOMES, Row
from campaign.workload import CONFIG
from slurm_rlhf.errors import printable
from slurm_rlhf.run_directory import write_atomically

TABLE = "campaign.json"


@dataclass(slots=True)
class Campaign:
    """Holds the rows of a campaign, and the faults that this machine could not run with the reason."""

    seed: int
    rows: list[Row]
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
        """Write campaign.json into `directory`. Raises OSError."""
        content = {"good": self.good, "summary": self.summary()} | asdict(self)
        write_atomically(directory / TABLE, json.dumps(content, indent=1) + "\n")


def _most(seconds: Sequence[float]) -> str:
    return f"{max(seconds):.1f} s" if seconds else "-"


def left_out(faults: Sequence[Fault], reasons: dict[str, str]) -> list[tuple[str, str]]:
    """Name the faults that are not run, each with the reason of what it needs."""
    return [(fault.name, reasons[fault.needs]) for fault in faults]


def carried_out(rows: Iterable[Row], seed: int, out: Path, not_run: Sequence[tuple[str, str]] = ()) -> Campaign:
    """Print each row as it comes, and keep the table of all in `out`."""
    timeouts = ", ".join(f"{key} = {value}" for key, value in CONFIG.items() if key.startswith("timeout."))
    campaign = Campaign(seed, [], not_run, note=f"Time-outs of these runs, in seconds: {timeouts}.")
    began = time.monotonic()
    for row in rows:
        campaign.rows.append(row)
        campaign.seconds = time.monotonic() - began
        told = "; ".join(row.problems) or f"{row.outcome}, {row.said}".removesuffix(", ")
        print(f"{'ok   ' if row.good else 'WRONG'} {row.fault}: {printable(told)}", flush=True)
        campaign.write(out)
    print("\n".join([*campaign.summary(), f"the table is {out / TABLE}"]), flush=True)
    return campaign
