"""The curves of `learn_curves` as an SVG picture, written by hand: no plotting library is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from learn_curves import Point, Side

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999", "#f0e442")
"""Wong, Points of view: Color blindness (2011): told apart by all readers."""
WIDTH, HEIGHT, MARGIN, GAP = 460, 300, 50, 40


@dataclass(frozen=True, slots=True)
class _Panel:
    """Maps numbers to places in one of the two drawings."""

    left: float
    most: float  # on the horizontal axis
    low: float  # on the vertical axis, which ends at 1

    def place(self, x: float, y: float) -> str:
        across = self.left + WIDTH * x / self.most
        down = MARGIN + HEIGHT * (1 - y) / (1 - self.low)
        return f"{across:.1f},{down:.1f}"


def picture(sides: Sequence[Side], title: str) -> str:
    """Draw accuracy over seconds and over samples: a thick line for the mean of each side, a thin one for each seed."""
    points = [point for side in sides for run in side.runs for point in run.points]
    low = min(0.9, int(min(point.accuracy for point in points) * 10) / 10)
    axes: list[tuple[str, Callable[[Point], float]]] = [
        ("seconds of training", lambda point: point.seconds),
        ("samples", lambda point: float(point.samples)),
    ]
    body = []
    for number, (name, value) in enumerate(axes):
        most = max([1e-9, *map(value, points)])
        panel = _Panel(MARGIN + number * (WIDTH + MARGIN + GAP), most, low)
        body += _frame(panel, name)
        for side, colour in zip(sides, _colours(len(sides)), strict=True):
            body += [_line(panel, run.points, value, colour, 0.6) for run in side.runs if len(side.runs) > 1]
            body.append(_line(panel, side.mean(), value, colour, 2.5))
    for number, (side, colour) in enumerate(zip(sides, _colours(len(sides)), strict=True)):
        down = MARGIN + HEIGHT - 16 * (len(sides) - number)
        body.append(_text(MARGIN + WIDTH - 8, down, side.name, "end", colour))
    wide, high = 2 * (WIDTH + MARGIN) + GAP + 20, HEIGHT + 2 * MARGIN
    size = f'width="{wide}" height="{high}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    background = f'<rect {size} fill="white"/>'
    return "\n".join([head, background, _text(MARGIN, 24, title, "start"), *body, "</svg>", ""])


def _colours(count: int) -> list[str]:
    return [COLOURS[number % len(COLOURS)] for number in range(count)]


def _frame(panel: _Panel, name: str) -> list[str]:
    """Draw the axes with five marks each."""
    drawn = [
        f'<rect x="{panel.left}" y="{MARGIN}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#888"/>',
        _text(panel.left + WIDTH / 2, HEIGHT + 2 * MARGIN - 12, name, "middle"),
    ]
    for mark in range(5):
        share = mark / 4
        drawn.append(_text(panel.left + WIDTH * share, MARGIN + HEIGHT + 16, f"{panel.most * share:,.0f}", "middle"))
        accuracy = panel.low + (1 - panel.low) * share
        down = MARGIN + HEIGHT * (1 - share)
        drawn.append(_text(panel.left - 6, down + 4, f"{accuracy:.3g}", "end"))
        drawn.append(f'<path d="M{panel.left},{down:.1f} h{WIDTH}" stroke="#ddd"/>')
    return drawn


def _line(panel: _Panel, points: Sequence[Point], value: Callable[[Point], float], colour: str, width: float) -> str:
    places = " ".join(panel.place(value(point), point.accuracy) for point in points)
    return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#222") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'
