"""Show what was compared: a line for each model and precision, and what is wrong below."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Sequence

from slurm_rlhf.parity.subjects import Subject
from slurm_rlhf.parity.verdicts import AGREE, PAIRS, VERDICTS, Line, name_of

_FIGURE = 7
_PAIR = 2 * _FIGURE + 1
_COLUMNS = tuple(name_of(pair) for pair in PAIRS)


class Table:
    """Lays out lines one after the other, as they become known."""

    def __init__(self, subjects: Sequence[Subject], precisions: Sequence[str]) -> None:
        self._name = max([len(_label(subject.name, subject.architecture)) for subject in subjects] + [5])
        self._precision = max([*map(len, precisions), 9])

    def head(self) -> str:
        """Return the two lines above all others: the pairs, and what stands below each."""
        left = self._name + 2 + self._precision + 2 + 6
        pairs = "  ".join(column.center(_PAIR) for column in _COLUMNS)
        below = "  ".join(f"{'max':>{_FIGURE}} {'mean':>{_FIGURE}}" for _ in _COLUMNS)
        titles = f"{'model':{self._name}}  {'precision':{self._precision}}  {'tokens':>6}"
        return f"{'nats apart:':>{left}}  {pairs}\n{titles}  {below}  verdict"

    def row(self, line: Line, first: bool) -> str:
        """Return a line; its name stands before the `first` of a model only."""
        name = _label(line.model, line.architecture) if first else ""
        start = f"{name:{self._name}}  {line.precision:{self._precision}}  {line.tokens or '-':>6}"
        cells = []
        for column in _COLUMNS:
            pair = line.apart.get(column)
            cells.append(
                f"{_figure(pair.largest)} {_figure(pair.mean)}" if pair else f"{'-':>{_FIGURE}} {'-':>{_FIGURE}}"
            )
        return f"{start}  {'  '.join(cells)}  {line.verdict}"


def _label(name: str, architecture: str) -> str:
    return f"{name} ({architecture})" if architecture and architecture != name else name


def _figure(value: float) -> str:
    return f"{value:>{_FIGURE}.1e}" if math.isfinite(value) else f"{'NaN':>{_FIGURE}}"


def reasons(lines: Sequence[Line], width: int) -> str:
    """Tell of each line that does not agree why, and show what its process said last; empty: all agree."""
    told = []
    for line in lines:
        if line.verdict == AGREE:
            continue
        where = f"{line.model}, {line.precision}" if line.precision else line.model
        told.append(textwrap.fill(f"{where}: {line.verdict}: {line.reason}", width, subsequent_indent="  "))
        told += [f"    {said}" for said in line.log]
    return "\n".join(told)


def summary(lines: Sequence[Line]) -> str:
    """Count the verdicts: `11 agree, 1 differ, 2 refused`."""
    counted = Counter(line.verdict for line in lines)
    return ", ".join(f"{counted[verdict]} {verdict}" for verdict in VERDICTS if counted[verdict])
