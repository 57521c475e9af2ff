"""How long nothing may move in a phase of a step: learned from the earlier steps of the same run."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

FACTOR = 10.0
"""A wait this many times as long as the phase's usual longest one is no ordinary wait."""
LEARNED = 3
"""Passes through a phase before its budget is learned; until then it is the ceiling."""
REMEMBERED = 50


@dataclass(frozen=True, slots=True)
class Budget:
    """Says how many seconds nothing may move in a phase."""

    seconds: float
    usual_s: float | None  # longest wait of a usual pass; None: too few passes to tell

    def words(self) -> str:
        if self.usual_s is None:
            return f"budget {self.seconds:.0f} s, most of the deadline: too few steps to know what is usual"
        return f"budget {self.seconds:.0f} s; usually nothing moves for {self.usual_s:.1f} s at most"


@dataclass(slots=True)
class WaitBudgets:
    """Learns the longest wait of each pass through each phase, and makes budgets of their median.

    The median, because a single pass that was held up, by a slow disk or by a hang that ended, must not widen the
    budget of the later ones.
    """

    floor_s: float
    _longest: dict[str, deque[float]] = field(default_factory=dict, init=False)
    _now: dict[str, float] = field(default_factory=dict, init=False)  # longest so far, in the pass that is under way

    def waited(self, phase: str, seconds: float) -> None:
        """Note that something moved in `phase`, after `seconds` in which nothing had."""
        self._now[phase] = max(self._now.get(phase, 0.0), seconds)

    def passed(self, phase: str) -> None:
        """Note that `phase` is over."""
        if phase in self._now:
            self._longest.setdefault(phase, deque(maxlen=REMEMBERED)).append(self._now.pop(phase))

    def of(self, phase: str, ceiling_s: float) -> Budget:
        """Return the budget of `phase`, between the floor and `ceiling_s`, which wins."""
        seen = self._longest.get(phase, ())
        if len(seen) < LEARNED:
            return Budget(ceiling_s, None)
        usual = statistics.median(seen)
        return Budget(min(max(self.floor_s, FACTOR * usual), ceiling_s), usual)
