"""Accuracy over samples and over seconds: curves of several seeds, their means, and how two sides compare."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

QUARTERS = (0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, slots=True)
class Point:
    """Holds one evaluation."""

    samples: int  # responses trained on so far
    seconds: float  # of training so far, without evaluations and start-up
    accuracy: float  # of greedy answers to the evaluation prompts


@dataclass(frozen=True, slots=True)
class Learned:
    """Holds what one run has learned, and when."""

    seed: int
    points: list[Point]  # by samples; the first before training
    start_up_s: float  # from the start of its process to its first step, with the evaluation before
    processes: str = ""  # how many computed with how many threads each, as in "actor 2 x 1"


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
        return _on_line([point.samples for point in points], [point.accuracy for point in points], samples)

    def seconds_to(self, accuracy: float) -> float | None:
        """Return the seconds of training until the mean accuracy is reached first; None: never."""
        points = self.mean()
        for before, after in itertools.pairwise(points):
            if before.accuracy >= accuracy:
                return before.seconds
            if after.accuracy >= accuracy:
                share = (accuracy - before.accuracy) / (after.accuracy - before.accuracy)
                return before.seconds + share * (after.seconds - before.seconds)
        return None


def table(ours: Side, peer: Side | None) -> str:
    """Write accuracy by samples, seconds by accuracy, and start-up for a reader."""
    sides = [ours, *([peer] if peer else [])]
    lines = [f"{'accuracy after':>24}" + "".join(f"{side.name:>16}" for side in sides)]
    last = ours.mean()[-1].samples
    for share in QUARTERS:
        cells = "".join(f"{side.accuracy_at(share * last):16.3f}" for side in sides)
        lines.append(f"{f'{round(share * last):,} samples':>24}{cells}")
    lines.append(f"{'seconds to':>24}" + ("   ratio, with start-up: seconds and ratio" if peer else ""))
    for accuracy in levels(peer or ours):
        lines.append(f"{f'{accuracy:.3f}':>24}" + _race(accuracy, ours, peer))
    rows = {
        "seconds of training": [side.mean()[-1].seconds for side in sides],
        "start-up, seconds": [side.start_up_s for side in sides],
    }
    lines += [f"{name:>24}" + "".join(f"{value:16.1f}" for value in values) for name, values in rows.items()]
    if used := [f"{side.name} {side.runs[0].processes}" for side in sides if side.runs[0].processes]:
        lines.append(f"processes x threads: {', '.join(used)}")
    seeds = ", ".join(str(run.seed) for run in ours.runs)
    return "\n".join([*lines, f"means over seeds {seeds}; seconds of training are without evaluations"])


def levels(side: Side) -> list[float]:
    """Choose accuracies to race to: those that a side has after each quarter of its samples, each once.

    They are rounded down, so that the side reaches each.
    """
    last = side.mean()[-1].samples
    return sorted({math.floor(1000 * side.accuracy_at(share * last) + 1e-9) / 1000 for share in QUARTERS})


def _race(accuracy: float, ours: Side, peer: Side | None) -> str:
    """Write the seconds of both sides to an accuracy, and ours over theirs."""
    mine = ours.seconds_to(accuracy)
    if peer is None:
        return _seconds(mine)
    theirs = peer.seconds_to(accuracy)
    text = _seconds(mine) + _seconds(theirs)
    if mine is None or theirs is None:
        return text
    whole, other = mine + ours.start_up_s, theirs + peer.start_up_s
    return f"{text}   {mine / max(theirs, 1e-9):5.2f}   {whole:.1f} and {other:.1f}, {whole / other:.2f}"


def _seconds(value: float | None) -> str:
    return f"{'never':>16}" if value is None else f"{value:16.1f}"


def _on_line(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Interpolate; `xs` ascend, and beyond their ends the outermost value holds."""
    for left, right, low, high in zip(xs, xs[1:], ys, ys[1:], strict=False):
        if left <= x <= right:
            return low + (high - low) * (x - left) / (right - left)
    return ys[0] if x < xs[0] else ys[-1]
