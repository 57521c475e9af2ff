"""The page of a campaign: one HTML file with a table, that needs no other file and no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from slurm_rlhf.campaign.verdicts import Row

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #7a8494; --good: #047857; --bad: #b91c1c; }
@media (prefers-color-scheme: dark) { :root { --good: #3fcf9b; --bad: #ff8a8a; } }
body { font: 15px/1.45 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; margin: 1.5rem 2vw; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.87rem; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: 0.35rem 0.6rem; border-bottom: 1px solid var(--line); }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.said, .soft { color: var(--soft); overflow-wrap: anywhere; } .said { max-width: 34rem; }
.good { color: var(--good); } .bad { color: var(--bad); }
"""
HEADINGS = ("", "fault", "struck in", "detected", "culprit", "how it went on", "metrics", "left behind")


def page(
    title: str, summary: Sequence[str], rows: Sequence[Row], not_run: Sequence[tuple[str, str]], note: str = ""
) -> str:
    """Return the page; rows that are not as they should be come first."""
    ordered = sorted(rows, key=lambda row: row.good)
    lines = "".join(f"<li>{escape(line)}</li>" for line in summary)
    head = "".join(f"<th>{heading}</th>" for heading in HEADINGS)
    body = "\n".join(_line(row) for row in ordered)
    absent = "".join(f"<li>{escape(name)} <span class=soft>{escape(why)}</span></li>" for name, why in not_run)
    rest = f"<h2>Not run here</h2><ul>{absent}</ul>" if not_run else ""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{STYLE}</style></head>
<body><h1>{escape(title)}</h1><ul>{lines}</ul><p class=soft>{escape(note)}</p>
<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>
{body}
</tbody></table></div>{rest}</body></html>
"""


def _line(row: Row) -> str:
    mark = "<td class=good>ok</td>" if row.good else "<td class=bad>wrong</td>"
    detected = "-" if row.detected_s is None else f"{row.detected_s:.1f} s"
    culprit = {None: "nothing to name", True: "named", False: "<b class=bad>not named</b>"}[row.culprit]
    equal = {None: "-", True: f"equal, {row.compared} steps", False: "<b class=bad>differ</b>"}[row.equal]
    said = f"<div class=said>{escape(row.said)}</div>" if row.said else ""
    wrong = "".join(f"<div class=bad>{escape(text)}</div>" for text in row.problems)
    left = "<br>".join(escape(one) for one in row.left) or "nothing"
    cells = [f"{escape(row.fault)}{wrong}", escape(row.hit), detected, culprit + said, escape(row.outcome), equal, left]
    classes = ("", "", " class=number", "", "", "", "")
    return f"<tr>{mark}{''.join(f'<td{style}>{cell}</td>' for style, cell in zip(classes, cells, strict=True))}</tr>"
