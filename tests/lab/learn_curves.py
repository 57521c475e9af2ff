"""Accuracy over samples and over seconds: curves of several seeds, their means, comparisons, and a picture."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from statistics import mean

import numpy as np

QUARTERS = (0.25, 0.5, 0.75, 1.0)
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999", "#f0e442")
"""Wong, Points of view: Color blindness (2011): distinct for all readers."""
WIDTH, HEIGHT, MARGIN = 460, 300, 50


@dataclass(frozen=True, slots=True)
class Point:
    """Holds one evaluation."""

    samples: int  # responses trained on so far
    seconds: float  # training time so far, without evaluations and start-up
    accuracy: float  # share of right greedy answers to the evaluation prompts


@dataclass(frozen=True, slots=True)
class Learned:
    """Holds what one run has learned, and when."""

    seed: int
    points: list[Point]  # by samples; the first before training
    start_up_s: float  # from the start of its process to its first step, with the evaluation before


@dataclass(frozen=True, slots=True)
class Side:
    """Holds the runs of one side of the comparison, one for each seed, with evaluations after the same samples."""

    name: str
    runs: list[Learned]

    @property
    def start_up_s(self) -> float:
        return mean(run.start_up_s for run in self.runs)

    def mean(self) -> list[Point]:
        """Average the runs point by point. Raises ValueError where they were evaluated after different samples."""
        rows = list(zip(*(run.points for run in self.runs), strict=True))
        if any(len({point.samples for point in row}) > 1 for row in rows):
            raise ValueError(f"the runs of {self.name} were not evaluated after the same samples")
        return [
            Point(row[0].samples, mean(point.seconds for point in row), mean(point.accuracy for point in row))
            for row in rows
        ]

    def accuracy_at(self, samples: float) -> float:
        """Return the mean accuracy after so many samples, straight lines between the points."""
        points = self.mean()
        return float(np.interp(samples, [point.samples for point in points], [point.accuracy for point in points]))

    def seconds_to(self, accuracy: float) -> float | None:
        """Return the seconds of training until the mean accuracy is reached first; None: never."""
        for before, after in itertools.pairwise(self.mean()):
            if before.accuracy >= accuracy:
                return before.seconds
            if after.accuracy >= accuracy:
                share = (accuracy - before.accuracy) / (after.accuracy - before.accuracy)
                return before.seconds + share * (after.seconds - before.seconds)
        return None

    def area(self) -> float:
        """Average the mean curve over its samples: it tells early learning from late."""
        points = self.mean()
        xs, ys = [point.samples for point in points], [point.accuracy for point in points]
        return float(np.trapezoid(ys, xs)) / max(xs[-1], 1)


def race(ours: Side, peer: Side | None) -> str:
    """Write accuracy by samples, seconds by accuracy, and start-up for a reader."""
    sides = [ours, *([peer] if peer else [])]
    lines = [f"{'accuracy after':>24}" + "".join(f"{side.name:>16}" for side in sides)]
    last = ours.mean()[-1].samples
    for share in QUARTERS:
        cells = "".join(f"{side.accuracy_at(share * last):16.3f}" for side in sides)
        lines.append(f"{f'{round(share * last):,} samples':>24}{cells}")
    lines.append(f"{'seconds to':>24}" + ("   ratio, with start-up: seconds and ratio" if peer else ""))
    for accuracy in levels(peer or ours):
        times = [side.seconds_to(accuracy) for side in sides]
        cells = "".join(f"{'never':>16}" if seconds is None else f"{seconds:16.1f}" for seconds in times)
        if peer and None not in times:
            mine, theirs = (float(seconds or 0) for seconds in times)
            whole, other = mine + ours.start_up_s, theirs + peer.start_up_s
            cells += f"   {mine / max(theirs, 1e-9):5.2f}   {whole:.1f} and {other:.1f}, {whole / other:.2f}"
        lines.append(f"{f'{accuracy:.3f}':>24}{cells}")
    rows = {
        "seconds of training": [side.mean()[-1].seconds for side in sides],
        "start-up, seconds": [side.start_up_s for side in sides],
    }
    lines += [f"{name:>24}" + "".join(f"{value:16.1f}" for value in values) for name, values in rows.items()]
    seeds = ", ".join(str(run.seed) for run in ours.runs)
    return "\n".join([*lines, f"means over seeds {seeds}; seconds of training are without evaluations"])


def levels(side: Side) -> list[float]:
    """Choose accuracies to race to: those that a side has after each quarter of its samples, each once.

    They are rounded down, so that the side reaches each.
    """
    last = side.mean()[-1].samples
    return sorted({math.floor(1000 * side.accuracy_at(share * last) + 1e-9) / 1000 for share in QUARTERS})


def table(sides: Sequence[Side]) -> str:
    """Write the accuracy of each side before training and after it, by seed, and what lies between."""
    seeds = "".join(f"{f'seed {run.seed}':>8}" for run in sides[0].runs)
    width = max(8, *(len(side.name) for side in sides))
    lines = [f"{'recipe':<{width}}{'before':>8}{seeds}{'mean':>8}{'area':>8}{'seconds':>9}"]
    ends = {side.name: side.mean()[-1].samples for side in sides}
    last = max(ends.values())
    for side in sides:
        curve = side.mean()
        numbers = [curve[0].accuracy, *(run.points[-1].accuracy for run in side.runs), curve[-1].accuracy, side.area()]
        lines.append(f"{side.name:<{width}}{''.join(f'{each:8.3f}' for each in numbers)}{curve[-1].seconds:9.1f}")
    lines.append(f"accuracy after {last:,} responses; seconds of training are means, without start-up and evaluations")
    short = {name: end for name, end in ends.items() if end < last}
    return "\n".join(
        [
            *lines,
            *(f"{name}: after {end:,} responses, the last that all of its runs reached" for name, end in short.items()),
        ]
    )


def picture(sides: Sequence[Side], title: str) -> str:
    """Draw accuracy over seconds and over samples: a thick line for the mean of each side, a thin one for each seed."""
    points = [point for side in sides for run in side.runs for point in run.points]
    low = min(0.9, int(min(point.accuracy for point in points) * 10) / 10)
    axes: dict[str, Callable[[Point], float]] = {
        "seconds of training": lambda point: point.seconds,
        "samples": lambda point: point.samples,
    }
    wide, high = 2 * WIDTH + 3 * MARGIN, HEIGHT + 2 * MARGIN
    drawn = [f'<rect width="{wide}" height="{high}" fill="white"/>', _text(MARGIN, 24, title)]
    for left, (name, value) in zip((MARGIN, WIDTH + 2 * MARGIN), axes.items(), strict=True):
        most = max([1e-9, *map(value, points)])
        drawn.append(f'<path d="M{left},{MARGIN} v{HEIGHT} h{WIDTH}" fill="none" stroke="#888"/>')
        for share in (0, 0.5, 1):
            drawn.append(_text(left + 0.9 * WIDTH * share, high - MARGIN + 16, f"{most * share:,.0f}"))
            drawn.append(_text(left - 30, MARGIN + HEIGHT * (1 - share), f"{low + (1 - low) * share:.2f}"))
        drawn.append(_text(left + WIDTH / 3, high - 12, name))
        for place, (side, colour) in enumerate(zip(sides, itertools.cycle(COLOURS), strict=False)):
            thin = [(run.points, 0.6) for run in side.runs if len(side.runs) > 1]
            for curve, width in [*thin, (side.mean(), 2.5)]:
                spots = [(WIDTH * value(each) / most, HEIGHT * (1 - each.accuracy) / (1 - low)) for each in curve]
                line = " ".join(f"{left + across:.1f},{MARGIN + down:.1f}" for across, down in spots)
                drawn.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
            drawn.append(_text(left + 0.75 * WIDTH, high - MARGIN - 16 * (len(sides) - place), side.name, colour))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" font-family="sans-serif">'
    return "\n".join([head, *drawn, "</svg>", ""])


def _text(x: float, y: float, text: str, colour: str = "#222") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="12" fill="{colour}">{escape(text)}</text>'
