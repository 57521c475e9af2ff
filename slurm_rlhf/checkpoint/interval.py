"""How often to save, from what saving takes and how often something fails: pure functions.

A save costs the run C seconds. A failure, one in every M seconds, costs the work since the newest checkpoint: half an
interval T on average. So a share C / T + T / (2 M) of the time is lost, least at T = sqrt(2 C M).
Source: Young, A First Order Approximation to the Optimum Checkpoint Interval (1974); Daly (2006) is the next order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from slurm_rlhf.observe.run_log import BEGINS, ENDS, ERROR, HANG, REQUEUE, RESTART, RunEvent

LONGEST_S = 3600.0
"""No more work than this is at stake, however rare failures are ..."""
LEAST_SHARE = 0.05
"""... unless saving so often took more than this share of the time."""


def best_interval(cost_s: float, written_s: float, mtbf_s: float) -> float:
    """Return the seconds from save to save.

    cost_s: that a save keeps the run from its steps; written_s: until it is on disk, with async_save more than that;
    mtbf_s: mean time between failures. Never shorter than a save is written, nor longer than an hour where saving
    every hour costs less than `LEAST_SHARE` of the time.
    """
    best = math.sqrt(2.0 * cost_s * mtbf_s)
    longest = max(LONGEST_S, cost_s / LEAST_SHARE)
    return max(min(best, longest), written_s, cost_s)


def in_steps(interval_s: float, step_s: float) -> int:
    """Return the whole steps of an interval, at least 1."""
    return max(1, int(interval_s / max(step_s, 1e-9)))


@dataclass(frozen=True, slots=True)
class Failures:
    """Hold how often a run has failed."""

    stops: int  # stops of this run before it could save
    observed_s: float  # over all of its sessions
    nodes: int
    mtbf_hours: float  # hours between failures of one node

    @property
    def mtbf_s(self) -> float:
        """Mean time between failures: what this run has seen, if it has seen any, else that of a node over nodes."""
        if self.stops:
            return self.observed_s / self.stops
        return self.mtbf_hours * 3600.0 / self.nodes

    def words(self) -> str:
        """Say where the number comes from."""
        between = f"{span(self.mtbf_s)} between failures"
        if self.stops:
            return f"{between}: this run had {self.stops} in {span(self.observed_s)}"
        return f"{between}: ckpt.mtbf_hours = {self.mtbf_hours:g} over {self.nodes} node{'s' * (self.nodes > 1)}"


def span(seconds: float) -> str:
    """Write a time in the unit that suits it."""
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}" if seconds >= 10 * size else f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def failures(events: Sequence[RunEvent], nodes: int, mtbf_hours: float) -> Failures:
    """Read the failures of a run off its events; the last session is the one under way.

    A session counts as failed if it had done a step, and an error or a hang ended it, or nothing did: its conductor
    was killed. One that got a signal to stop has saved. A restart of the trainers within a session is a failure, too.
    """
    stops = sum(event.event == RESTART for event in events)
    sessions = _sessions(events)
    observed = sum(session[-1].at - session[0].at for session in sessions)
    for session in sessions[:-1]:
        ended = session[-1].event
        failed = ended in (ERROR, HANG) or ended not in (*ENDS, REQUEUE)
        stops += failed and session[-1].step > session[0].step
    return Failures(stops, observed, nodes, mtbf_hours)


def _sessions(events: Sequence[RunEvent]) -> list[list[RunEvent]]:
    found: list[list[RunEvent]] = []
    for event in events:
        if event.event in BEGINS or not found:
            found.append([])
        found[-1].append(event)
    return found
