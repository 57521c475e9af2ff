"""Two ways to do the same, timed in turns: whatever else the machine does meets both."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Times:
    """One side's repetitions."""

    rates: list[float] = field(default_factory=list)  # tokens per second
    cpu_rates: list[float] = field(default_factory=list)  # tokens per second of CPU time, all threads of the process


@dataclass(slots=True)
class Race:
    """Repetition i of both sides ran one right after the other."""

    ours: Times = field(default_factory=Times)
    bare: Times = field(default_factory=Times)

    def to_json(self) -> dict[str, Any]:
        """Medians, `ratio` and `cpu_ratio` (ours over bare, pair by pair, their medians), the single runs, `load`.

        `load`: processes that wanted to run, a mean over the last minute; other work than this makes the ratio of
        single runs jump, the one of CPU time much less.
        """
        return {
            "ours": statistics.median(self.ours.rates),
            "bare": statistics.median(self.bare.rates),
            "ratio": _ratio(self.ours.rates, self.bare.rates),
            "cpu_ratio": _ratio(self.ours.cpu_rates, self.bare.cpu_rates),
            "runs": {"ours": self.ours.rates, "bare": self.bare.rates},
            "load": os.getloadavg()[0],
        }


def race(ours: Callable[[int], int], bare: Callable[[int], int], repeats: int) -> Race:
    """Call both with 0 .. repeats, in turns, the first of each pair taking turns as well.

    Both return how many tokens they have done. Repetition 0 is a warm-up of both that does not count.
    """
    result = Race()
    for number in range(repeats + 1):
        sides = [(ours, result.ours), (bare, result.bare)]
        for run, times in sides if number % 2 else reversed(sides):
            began, began_cpu = time.perf_counter(), time.process_time()
            tokens = run(number)
            seconds, cpu = time.perf_counter() - began, time.process_time() - began_cpu
            if number:
                times.rates.append(tokens / seconds)
                times.cpu_rates.append(tokens / cpu)
    return result


def _ratio(ours: list[float], bare: list[float]) -> float:
    return statistics.median(mine / other for mine, other in zip(ours, bare, strict=True))
