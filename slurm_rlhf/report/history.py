"""The time axis of a run: its sessions, which are the starts of it, and what happened when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slurm_rlhf.observe.events import BEGINS, CHECKPOINT, ENDS, HANG, REQUEUE, RESTART, RunEvent

MOST = 400
"""Events in a report; of the checkpoints and warnings in the middle only the later ones."""


def sessions(events: Sequence[RunEvent], now: float, running: bool) -> list[dict[str, Any]]:
    """Return the sessions, {"begin", "end", "first", "last", "how"}: Unix times, steps done at both ends.

    A session without an end of its own was killed, unless it is the last one of a run that is `running`: that one goes
    on until `now`.
    """
    found: list[dict[str, Any]] = []
    is_open = False
    for event in events:
        if event.event in BEGINS:
            if is_open:
                found[-1]["how"] = "killed"
            found.append({"begin": event.at, "end": event.at, "first": event.step, "last": event.step, "how": "killed"})
            is_open = True
        elif is_open or (found and found[-1]["how"] == HANG and event.event != REQUEUE):
            is_open = True  # a run may go on after a hang, or without an engine that hangs
            found[-1] |= {"end": event.at, "last": event.step}
            if event.event in ENDS:
                found[-1]["how"], is_open = event.event, False
    if is_open and running:
        found[-1] |= {"end": max(now, found[-1]["end"]), "how": "running"}
    return found


def shown(events: Sequence[RunEvent]) -> list[RunEvent]:
    """Return the events for the page: all, or without the oldest of those that come often."""
    often = [event for event in events if event.event in (CHECKPOINT, "warning")]
    spare = set(map(id, often[: max(0, len(events) - MOST)]))
    return [event for event in events if id(event) not in spare]


def requeues(events: Sequence[RunEvent]) -> int:
    """Count how often the run has asked to go on in another allocation."""
    return sum(event.event == REQUEUE for event in events)


def restarts(events: Sequence[RunEvent]) -> int:
    """Count how often roles were started again within a job."""
    return sum(event.event == RESTART for event in events)
