"""How long the rest will take."""

from __future__ import annotations

import math
import time
from collections import deque

_WINDOW = 20  # steps that the estimate looks back


class Clock:
    """Takes the mean of the last steps: the first ones, which compile and warm up, are soon out of it."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._ends: deque[float] = deque(maxlen=_WINDOW + 1)

    def tick(self) -> None:
        """The steps begin, or one more is done."""
        self._ends.append(time.monotonic())

    def remaining(self, steps: int) -> float:
        """Seconds that `steps` more steps take; NaN while nothing is known."""
        if len(self._ends) < 2:
            return math.nan
        return (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1) * steps

    def since_tick(self) -> float:
        """Seconds since the last step was done."""
        return time.monotonic() - self._ends[-1] if self._ends else 0.0

    def elapsed(self) -> float:
        """Seconds since this clock was made."""
        return time.monotonic() - self._start
