"""How fast the bytes of each actor rank arrive, and when a plan should follow that: without torch.

Engine ranks measure during an update, rank 0 adds up what they report, and advises all of them how the next updates
are to be shared out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from slurm_rlhf.weight_sync.balance import seconds
from slurm_rlhf.weight_sync.transfer_plan import SyncPlan, streams

_LEAST = 1 << 19  # bytes that must have come from a rank, or nothing is known of it
_GAIN = 1.2  # how many times faster another plan has to be, so that members change to it
_TIMES = 2  # updates in a row that have to say so: one may have had a busy machine


class Arrivals:
    """Measure an engine rank's intake from each actor rank over the network. One thread for each of those."""

    def __init__(self, actors: int) -> None:
        self._nbytes = [0] * actors
        self._busy = [0.0] * actors  # seconds in which this rank was ready to take more
        self._last = [0.0] * actors

    def came(self, actor: int, nbytes: int, asked: float) -> None:
        """Count what has come just now. `asked`: when this rank was ready for it, in seconds of time.monotonic."""
        now = time.monotonic()
        self._busy[actor] += now - max(asked, self._last[actor])
        self._last[actor] = now
        self._nbytes[actor] += nbytes

    def take(self) -> tuple[float, ...]:
        """Return the bytes/s from each actor rank since the last call; 0 where hardly anything came."""
        counted = zip(self._nbytes, self._busy, strict=True)
        found = tuple(nbytes / max(busy, 1e-6) if nbytes >= _LEAST else 0.0 for nbytes, busy in counted)
        self._nbytes, self._busy = [0] * len(found), [0.0] * len(found)
        return found


class Adviser:
    """Decide at rank 0 at which rates members should plan."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, ...]] = []

    def advise(self, plan: SyncPlan, reports: Sequence[Sequence[float]]) -> tuple[float, ...]:
        """Return the rates for the next update: those of `plan`, until others would be faster, update after update.

        `reports`: of each engine rank, what `Arrivals.take` said; empty ones count for nothing.
        """
        measured = [report for report in reports if report]
        rates = tuple(sum(report) for report in zip(*measured, strict=True))
        if not measured or gain(plan, rates) < _GAIN:
            self._seen = []
            return plan.layout.rates
        self._seen.append(rates)
        if len(self._seen) < _TIMES:
            return plan.layout.rates
        found = tuple(sum(values) / len(values) for values in zip(*self._seen, strict=True))
        self._seen = []
        return found


def gain(plan: SyncPlan, rates: Sequence[float]) -> float:
    """Return how many times faster than `plan` one made for these rates, in bytes/s of each actor rank, would be."""
    found = 1.0
    better = streams(replace(plan.layout, rates=tuple(rates)))
    for now, then in zip(plan.streams, better, strict=True):
        links, owned = [plan.layout.link(owner) for owner in now.owners], [rates[owner] for owner in now.owners]
        if all(owned) and any(duty.copies for duty in now.duties):
            found = max(found, seconds(links, now.duties, owned) / seconds(links, then.duties, owned))
    return found
