"""Make the page of a run, or of several: one HTML file that needs no other and no network. Write it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from slurm_rlhf.report.content import content
from slurm_rlhf.report.run_files import RunFiles
from slurm_rlhf.report.timeline import trace
from slurm_rlhf.run_directory import RunDirectory, write_atomically

SCRIPTS = (
    "base.js",
    "view.js",
    "lines.js",
    "curves.js",
    "times.js",
    "timeline.js",
    "history.js",
    "nodes.js",
    "evaluation.js",
    "samples.js",
    "settings.js",
    "main.js",
)
"""In the order in which they need each other."""


def page(content: dict[str, Any]) -> str:
    """Return the page that shows `content`."""
    folder = files("slurm_rlhf.report") / "page"
    parts = {name: (folder / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", *SCRIPTS)}
    script = "\n".join(parts[name] for name in SCRIPTS)
    html = parts["page.html"]
    for mark, text in (("/*CSS*/", parts["page.css"]), ("/*SCRIPT*/", script), ("/*DATA*/", embedded(content))):
        before, _, after = html.partition(mark)
        html = before + text + after
    return html


def embedded(content: dict[str, Any]) -> str:
    """Write JSON that can stand in a <script> element: whatever users' texts hold, nothing in it ends the element."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


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
