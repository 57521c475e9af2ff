"""Which engines are far below their peers: a pure function, and a count of steps, so that a hiccup names nobody."""

from __future__ import annotations

from collections.abc import Mapping

SHARE = 0.5
"""Below this share of its peers' median an engine is far below them."""
STEPS = 2
"""In so many steps in a row, before somebody is told."""


def far_below(rates: Mapping[int, float]) -> dict[int, float]:
    """engine -> median rate of all other engines, for each engine below `SHARE` of it.

    `rates`: engine -> tokens per second while it had requests; engines that had none (rate 0) are not judged, and
    judge nobody. With two engines the peers' median is the other one's rate, so one slow engine of two is found.
    """
    ordered = sorted((rate, engine) for engine, rate in rates.items() if rate > 0)
    if len(ordered) < 2:
        return {}
    found = {}
    for place, (rate, engine) in enumerate(ordered):
        peers = _median_without([rate for rate, _ in ordered], place)
        if rate < SHARE * peers:
            found[engine] = peers
    return found


def _median_without(ordered: list[float], place: int) -> float:
    """Median of `ordered` (ascending) without the element at `place`."""
    left = len(ordered) - 1

    def at(index: int) -> float:
        return ordered[index if index < place else index + 1]

    return (at((left - 1) // 2) + at(left // 2)) / 2


class Stragglers:
    """Remembers for how many steps in a row an engine was far below its peers."""

    def __init__(self) -> None:
        self._streaks: dict[int, int] = {}
        self.named: set[int] = set()
        """Engines that are known to be slow; an engine leaves when it was back among its peers for a step."""

    def step(self, rates: Mapping[int, float]) -> tuple[dict[int, float], list[int]]:
        """After a step: ({engine that is newly named -> its peers' median}, engines that are back)."""
        low = far_below(rates)
        back = sorted(engine for engine in self.named if rates.get(engine, 0.0) > 0 and engine not in low)
        self.named -= set(back)
        self._streaks = {engine: self._streaks.get(engine, 0) + 1 for engine in low}
        fresh = {e: peers for e, peers in low.items() if self._streaks[e] >= STEPS and e not in self.named}
        self.named |= set(fresh)
        return fresh, back
