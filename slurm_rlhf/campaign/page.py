"""The page of a campaign: one HTML file with a table, that needs no other file and no network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median

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
.said, .soft { color: var(--soft); overflow-wrap: anywhere; } .said { min-width: 26rem; max-width: 40rem; }
table.short { width: auto; }
.good { color: var(--good); } .bad { color: var(--bad); }
"""
HEADINGS = ("", "fault", "struck in", "detected", "culprit", "how it went on", "metrics", "left behind")
SUMS = ("", "faults", "as they should be", "detected, median", "slowest")


@dataclass(frozen=True, slots=True)
class Sum:
    """Adds up the rows of one kind, or of one phase."""

    name: str
    faults: int
    good: int
    median_s: float | None  # from the fault to the first sign of it; None: nothing had to be detected
    slowest_s: float | None


def sums(rows: Sequence[Row], part: Callable[[Row], str]) -> list[Sum]:
    """Add up the rows by a part of them, the most frequent first."""
    known: dict[str, list[Row]] = {}
    for row in rows:
        known.setdefault(part(row), []).append(row)
    found = []
    for name, ones in sorted(known.items(), key=lambda item: (-len(item[1]), item[0])):
        times = [row.detected_s for row in ones if row.detected_s is not None]
        middle, most = (median(times), max(times)) if times else (None, None)
        found.append(Sum(name, len(ones), sum(row.good for row in ones), middle, most))
    return found


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
</tbody></table></div>
{_summed("kind", sums(rows, lambda row: row.kind))}{_summed("phase", sums(rows, lambda row: row.phase))}
{rest}</body></html>
"""


def _summed(name: str, found: Sequence[Sum]) -> str:
    head = "".join(f"<th>{heading}</th>" for heading in (name, *SUMS[1:]))
    body = ""
    for one in found:
        mark = "good" if one.good == one.faults else "bad"
        body += f"<tr><td>{escape(one.name)}</td><td class=number>{one.faults}</td>"
        body += f'<td class="number {mark}">{one.good}</td>'
        body += f"<td class=number>{_seconds(one.median_s)}</td><td class=number>{_seconds(one.slowest_s)}</td></tr>"
    return f"<h2>By {name}</h2><div class=scroll><table class=short><tr>{head}</tr>{body}</table></div>"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def _line(row: Row) -> str:
    mark = "<td class=good>ok</td>" if row.good else "<td class=bad>wrong</td>"
    limit = f" <span class=soft>of {row.limit_s:g}</span>" if row.detected_s is not None else ""
    detected = _seconds(row.detected_s) + limit
    culprit = {None: "nothing to name", True: "named", False: "<b class=bad>not named</b>"}[row.culprit]
    steps = f"{row.compared} step{'s' if row.compared > 1 else ''}"
    equal = {None: "-", True: f"equal, {steps}", False: "<b class=bad>differ</b>"}[row.equal]
    said = f"<div class=said>{escape(row.said)}</div>" if row.said else ""
    wrong = "".join(f"<div class=bad>{escape(text)}</div>" for text in row.problems)
    left = "<br>".join(escape(one) for one in row.left) or "nothing"
    cells = [f"{escape(row.fault)}{wrong}", escape(row.hit), detected, culprit + said, escape(row.outcome), equal, left]
    classes = ("", "", " class=number", "", "", "", "")
    return f"<tr>{mark}{''.join(f'<td{style}>{cell}</td>' for style, cell in zip(classes, cells, strict=True))}</tr>"
