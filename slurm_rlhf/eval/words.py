"""Write an evaluation as text: a table of the data sets, tables of their parts, and failures to look at."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_rlhf.eval.estimators import Estimate
from slurm_rlhf.eval.report import DataSetReport, Subset, overall

SHOWN = 3
"""Number of failures of each data set on the terminal; eval.json has more."""
_WIDTH = 160  # characters of a prompt or response


def one_line(reports: Sequence[DataSetReport]) -> str:
    """Write the means in one line, for the console of a run."""
    each = ", ".join(f"{report.name} {_figure(report.whole.mean)}" for report in reports)
    return each if len(reports) == 1 else f"{overall(reports):.4f} ({each})"


def report_text(reports: Sequence[DataSetReport]) -> str:
    """Write the tables of all data sets, and a few failures of each."""
    rows = [["data set", "prompts", "samples", "mean score (95 %)", "pass@k", "majority", "cut off", "tokens"]]
    for report in reports:
        rows.append(
            [
                report.name,
                str(report.whole.prompts),
                f"{report.samples} {'greedy' if report.temperature == 0 else f't={report.temperature:g}'}",
                _figure(report.whole.mean),
                " ".join(f"{k}: {found.value:.3f}" for k, found in report.pass_at.items()),
                "-" if report.majority is None else f"{report.majority.value:.3f}",
                f"{report.whole.truncated:.1%}",
                f"{report.whole.response_tokens:.0f}",
            ]
        )
    blocks = [table(rows)]
    for report in reports:
        for title, parts in (
            ("source", report.sources),
            ("tokens of the prompt", report.prompt_lengths),
            ("tokens of the response", report.response_lengths),
        ):
            if len(parts) > 1 or (parts and title == "source"):
                blocks.append(f"{report.name}, by {title}:\n{_parts(title, parts)}")
        blocks.append(_failures(report))
    return "\n\n".join(filter(None, blocks))


def table(rows: Sequence[Sequence[str]]) -> str:
    """Align columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _parts(title: str, parts: Sequence[Subset]) -> str:
    rows = [[title, "prompts", "responses", "mean score (95 %)", "cut off", "tokens"]]
    for part in parts:
        rows.append(
            [
                part.name or "(none)",
                str(part.prompts),
                str(part.responses),
                _figure(part.mean),
                f"{part.truncated:.1%}",
                f"{part.response_tokens:.0f}",
            ]
        )
    return table(rows)


def _failures(report: DataSetReport) -> str:
    if not report.failed:
        return ""
    lines = [f"{report.name}: {report.failed} of {report.whole.prompts} prompts have no correct response, for example"]
    if report.errors:
        lines[0] = f"{report.name}: {report.errors} prompts have no response at all\n{lines[0]}"
    for failure in report.failures[:SHOWN]:
        said = f"error: {failure.error}" if failure.error else f"{_short(failure.response)} ({failure.finish_reason})"
        lines.append(f"  row {failure.index}: {_short(failure.prompt)}")
        lines.append(f"    -> {said}, score {failure.score:g}, label {_short(str(failure.label))}")
    return "\n".join(lines)


def _figure(found: Estimate) -> str:
    return f"{found.value:.4f} [{found.low:.4f}, {found.high:.4f}]"


def _short(text: str) -> str:
    shown = repr(text)
    return shown if len(shown) <= _WIDTH else f"{shown[:_WIDTH]} ... ({len(text)} characters)"
