"""The result of a campaign: the summary, and campaign.json."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from campaign.verdicts import Row
from campaign.workload import CONFIG
from slurm_rlhf.errors import printable
from slurm_rlhf.run_directory import write_atomically

TABLE = "campaign.json"


def summary(rows: Sequence[Row], seed: int, seconds: float) -> list[str]:
    """Return the figures of a campaign, a line each."""
    outcomes = ", ".join(f"{count} {name}" for name, count in Counter(row.outcome for row in rows).items())
    asked = [row.culprit for row in rows if row.culprit is not None]
    compared = [row.equal for row in rows if row.equal is not None]
    return [
        f"{len(rows)} faults, seed {seed}, {seconds:.0f} s: {outcomes or 'none'}",
        f"detected: slowest after {max((row.detected_s or 0.0 for row in rows), default=0.0):.1f} s",
        f"culprit named: {sum(asked)} of {len(asked)}",
        f"metrics equal to the calm run's: {sum(compared)} of {len(compared)}",
        f"left behind: {sum(len(row.left) for row in rows)} processes, files in /dev/shm and locks",
        f"as it should be: {sum(row.good for row in rows)} of {len(rows)}",
    ]


def carried_out(rows: Iterable[Row], seed: int, out: Path) -> list[Row]:
    """Print each row as it comes, and keep the table of all in `out`."""
    timeouts = {key: value for key, value in CONFIG.items() if key.startswith("timeout.")}
    began, found, figures = time.monotonic(), list[Row](), list[str]()
    for row in rows:
        found.append(row)
        stated = "; ".join(row.problems) or f"{row.outcome}, {row.said}".removesuffix(", ")
        print(f"{'ok   ' if row.good else 'WRONG'} {row.fault}: {printable(stated)}", flush=True)
        figures = summary(found, seed, time.monotonic() - began)
        content = {"good": all(each.good for each in found), "summary": figures, "seed": seed, "time-outs": timeouts}
        content["rows"] = [asdict(each) for each in found]
        write_atomically(out / TABLE, json.dumps(content, indent=1) + "\n")
    print("\n".join([*figures, f"the table is {out / TABLE}"]), flush=True)
    return found
