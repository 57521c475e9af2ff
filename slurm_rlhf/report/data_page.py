"""Make the page that shows what a model will see of its data sets: one HTML file that needs no network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from pathlib import Path

from slurm_rlhf.run_directory import write_atomically

BINS = 12
"""Most bars of a histogram."""


@dataclass(frozen=True, slots=True)
class ShownRow:
    """Holds the tokens of a sequence as the model sees them."""

    title: str
    tokens: list[str]
    loss: list[bool]  # whether the loss counts the token
    length: int  # tokens, also those that are left out here


@dataclass(slots=True)
class DataView:
    """Describes one data set."""

    key: str  # dotted key of the configuration
    path: str
    lengths: list[int]  # tokens of each sequence that is kept
    facts: list[str] = field(default_factory=list)  # lines about the whole: counts, duplicates
    dropped: list[str] = field(default_factory=list)  # a line for each reason or row
    rows: list[ShownRow] = field(default_factory=list)


def histogram(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """Count the lengths in bars of equal width: (shortest, longest, how many) of each."""
    if not lengths:
        return []
    low, high = min(lengths), max(lengths)
    width = -(-(high - low + 1) // BINS)
    counts = Counter((length - low) // width for length in lengths)
    return [
        (low + place * width, low + (place + 1) * width - 1, counts[place])
        for place in range((high - low) // width + 1)
    ]


def write_data_page(path: Path, views: Sequence[DataView]) -> None:
    """Write the page into a file. Raises OSError."""
    folder = files("slurm_rlhf.report") / "page"
    html = (folder / "data.html").read_text(encoding="utf-8")
    css = (folder / "page.css").read_text(encoding="utf-8")
    text = html.replace("/*CSS*/", css).replace("<!--BODY-->", "\n".join(map(_section, views)))
    write_atomically(path, text.encode("utf-8", "replace").decode())  # a text may have lone surrogates


def _section(view: DataView) -> str:
    most = max((count for *_, count in histogram(view.lengths)), default=1)
    bars = "".join(
        f"<tr><td>{low if low == high else f'{low} to {high}'}</td><td>{count}</td>"
        f'<td><div class="bar" style="width:{count / most:.1%}"></div></td></tr>'
        for low, high, count in histogram(view.lengths)
    )
    facts = "".join(f"<li>{escape(line)}</li>" for line in view.facts)
    dropped = "".join(f"<li>{escape(line)}</li>" for line in view.dropped) or "<li>none</li>"
    rows = "".join(map(_row, view.rows))
    return (
        f'<section><h2>{escape(view.key)}</h2><p class="soft">{escape(view.path)}</p><div class="wide">'
        f'<div class="card"><h3>The whole</h3><ul>{facts}</ul><h3>Left out</h3><ul>{dropped}</ul></div>'
        f'<div class="card"><h3>Tokens of a sequence</h3><table class="lengths">{bars}</table></div></div>'
        f"{rows}</section>"
    )


def _row(row: ShownRow) -> str:
    tokens = "".join(
        f'<span class="{"loss" if loss else "none"}">{escape(token)}</span>'
        for token, loss in zip(row.tokens, row.loss, strict=True)
    )
    left = row.length - len(row.tokens)
    more = f'<p class="soft">and {left} more tokens</p>' if left else ""
    return f'<div class="card tokens"><h3>{escape(row.title)}</h3><pre>{tokens}</pre>{more}</div>'
