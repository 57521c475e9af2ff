"""How long nothing may move in a phase of a step: learned from the earlier steps of the same run."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

FACTOR = 10.0
"""A wait this many times as long as the phase's usual longest one is no ordinary wait."""
LEARNED = 3
"""Passes through a phase until it is known what is usual."""
UNSURE = 3.0
"""Until then the budget is so many times as large."""
UNKNOWN = 20.0
"""In the first pass the budget is so many times the floor. It is told then, and the run ends at the ceiling only: there
is nothing that the wait could be compared with."""
REMEMBERED = 50


@dataclass(frozen=True, slots=True)
class Budget:
    """Says how many seconds nothing may move in a phase before it is told."""

    seconds: float
    usual_s: float | None  # longest wait of a usual pass; None: there was none yet
    ends_s: float = 0.0  # the run does not end before nothing has moved for so long

    def words(self) -> str:
        if self.usual_s is None:
            return f"budget {self.seconds:.0f} s: the first time, it is not known what is usual"
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

    def of(self, phase: str, ceiling_s: float, once: bool = False) -> Budget:
        """Return the budget of `phase`, between the floor and `ceiling_s`, which wins.

        `once`: the phase comes once and takes long, as loading a model does: its budget is the ceiling.
        """
        seen = self._longest.get(phase, ())
        if not seen:
            return Budget(ceiling_s if once else min(UNKNOWN * self.floor_s, ceiling_s), None, ceiling_s)
        usual, times = (max(seen), UNSURE) if len(seen) < LEARNED else (statistics.median(seen), 1.0)
        return Budget(min(times * max(self.floor_s, FACTOR * usual), ceiling_s), usual)
