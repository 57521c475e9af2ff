"""Add up what engines did, and find engines that are far slower than the others."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

SHARE = 0.5
"""An engine below this share of the median of its peers counts as far below them."""
STEPS = 2
"""Number of such steps in a row after which the engine is reported: a single hiccup is not."""


def far_below(rates: Mapping[int, float]) -> dict[int, float]:
    """Map each engine below `SHARE` of the median rate of all other engines to that median.

    `rates`: engine -> tokens per second while it had requests; engines that had none (rate 0) are left
    out. With two engines the peers' median is the other one's rate, so one slow engine of two is found.
    """
    ordered = sorted((rate, engine) for engine, rate in rates.items() if rate > 0)
    if len(ordered) < 2:
        return {}
    found = {}
    for place, (rate, engine) in enumerate(ordered):
        peers = median(other for other, _ in [*ordered[:place], *ordered[place + 1 :]])
        if rate < SHARE * peers:
            found[engine] = peers
    return found


class Stragglers:
    """Remember for how many steps in a row each engine was far below its peers."""

    def __init__(self) -> None:
        self._streaks: dict[int, int] = {}
        self.named: set[int] = set()
        """Engines that are known to be slow; an engine leaves after one step back among its peers."""

    def step(self, rates: Mapping[int, float]) -> tuple[dict[int, float], list[int]]:
        """Take the rates of a step; return ({newly slow engine -> median of its peers}, engines that are back)."""
        low = far_below(rates)
        back = sorted(engine for engine in self.named if rates.get(engine, 0.0) > 0 and engine not in low)
        self.named -= set(back)
        self._streaks = {engine: self._streaks.get(engine, 0) + 1 for engine in low}
        fresh = {e: peers for e, peers in low.items() if self._streaks[e] >= STEPS and e not in self.named}
        self.named |= set(fresh)
        return fresh, back
