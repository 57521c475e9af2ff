"""Write report.html and trace.json of a run, or one page of several runs."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from slurm_rlhf.report.content import content
from slurm_rlhf.report.page import page
from slurm_rlhf.report.run_files import RunFiles
from slurm_rlhf.report.timeline import trace
from slurm_rlhf.run_directory import RunDirectory, write_atomically


def write_report(directory: RunDirectory) -> None:
    """Write the report of a run into its directory. Raises OSError; an earlier report is left as it was then."""
    run = RunFiles.read(directory)
    write_page(directory.report, [run])
    if run.timeline:
        write_atomically(directory.trace, json.dumps(trace(run.timeline, run.layout)))


def write_page(path: Path, runs: Sequence[RunFiles]) -> None:
    """Write a page that shows `runs` into a file."""
    text = page(content(runs, time.time()))
    # Lone surrogates, which a text may hold, are no UTF-8.
    write_atomically(path, text.encode("utf-8", "replace").decode())
