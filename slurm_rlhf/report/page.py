"""Make the HTML page of its parts: one file that needs no other and no network."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

SCRIPTS = (
    "base.js",
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
