"""Make the time axis of a run: its sessions and events, and which rank computed or waited in the last steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from slurm_rlhf.observe.run_log import BEGINS, CHECKPOINT, ENDS, HANG, REQUEUE, RunEvent
from slurm_rlhf.observe.timing import joined

CONDUCTOR = "conductor"
MOST_EVENTS_STEPS = 8
"""Most steps on the page."""
MOST_EVENTS_ROWS = 128
"""Most ranks on the page; timeline.jsonl has all of them."""

Line = dict[str, Any]
"""Line of timeline.jsonl, as `StepSpans.line` returns it."""


def timeline(lines: Sequence[Line], layout: dict[str, Any]) -> dict[str, Any]:
    """Return {"names", "rows", "steps"}; a span is [row, name, begin, end], with indices of "rows" and "names"."""
    last = lines[-MOST_EVENTS_STEPS:]
    shares = layout.get("ranks", {}).get("roles", {})
    nodes = {(role, rank): share["node"] for role, each in shares.items() for share in each for rank in share["ranks"]}
    ranks = _ranks(last)[: MOST_EVENTS_ROWS - 1]
    rows = [{"role": CONDUCTOR, "rank": 0, "node": ""}]
    rows += [{"role": role, "rank": rank, "node": nodes.get((role, rank), "")} for role, rank in ranks]
    names = list(dict.fromkeys([name for line in last for name, *_ in line["phases"]]))
    calls = list(dict.fromkeys([name for line in last for _, _, name, *_ in line["calls"]]))
    place = {(row["role"], row["rank"]): index for index, row in enumerate(rows)}
    kinds = {name: index for index, name in enumerate([*names, *calls])}
    steps = []
    for line in last:
        spans = [[0, names.index(name), start, end] for name, start, end in line["phases"]]
        spans += [
            [place[role, rank], kinds[name], start, end]
            for role, rank, name, start, end in line["calls"]
            if (role, rank) in place
        ]
        steps.append({key: line[key] for key in ("step", "began", "seconds")} | {"spans": spans})
    return {"names": [*names, *calls], "rows": rows, "steps": steps, "left_out": len(_ranks(last)) - len(rows) + 1}


def role_times(lines: Sequence[Line]) -> dict[str, dict[str, float]]:
    """Return role -> call -> mean seconds per step and rank; `waits` is the time without a call in progress."""
    ranks: dict[str, set[int]] = defaultdict(set)
    spent: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    busy: dict[tuple[str, int, int], list[tuple[float, float]]] = defaultdict(list)
    for line in lines:
        for role, rank, name, start, end in line["calls"]:
            ranks[role].add(rank)
            spent[role][name] += end - start
            busy[role, rank, line["step"]].append((start, end))
    whole = sum(line["seconds"] for line in lines)
    found = {}
    for role, calls in spent.items():
        count = len(lines) * len(ranks[role])
        worked = sum(end - start for key, spans in busy.items() if key[0] == role for start, end in joined(spans, 0.0))
        scale = min(1.0, worked / max(sum(calls.values()), 1e-9))  # overlapping calls share the time
        times = {name: round(scale * seconds / count, 6) for name, seconds in calls.items()}
        found[role] = times | {"waits": round(max(0.0, whole * len(ranks[role]) - worked) / count, 6)}
    return found


def _ranks(lines: Sequence[Line]) -> list[tuple[str, int]]:
    """List the ranks that were called, with the roles in the order of their first call."""
    roles = list(dict.fromkeys(role for line in lines for role, *_ in line["calls"]))
    found = {(role, rank) for line in lines for role, rank, *_ in line["calls"]}
    return sorted(found, key=lambda each: (roles.index(each[0]), each[1]))


MOST_EVENTS = 400
"""Most events in a report; if there are more, the oldest checkpoints and warnings are left out."""


def sessions(events: Sequence[RunEvent], now: float, running: bool) -> list[dict[str, Any]]:
    """Return the sessions, {"begin", "end", "first", "last", "how"}: Unix times, and steps done at both ends.

    A session without an event that ends it was killed; the last session of a `running` run goes on until `now`.
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
            is_open = True  # a run may go on after a hang
            found[-1] |= {"end": event.at, "last": event.step}
            if event.event in ENDS:
                found[-1]["how"], is_open = event.event, False
    if is_open and running:
        found[-1] |= {"end": max(now, found[-1]["end"]), "how": "running"}
    return found


def shown(events: Sequence[RunEvent]) -> list[RunEvent]:
    """Return the events for the page, without the oldest checkpoints and warnings if there are too many."""
    often = [event for event in events if event.event in (CHECKPOINT, "warning")]
    spare = set(map(id, often[: max(0, len(events) - MOST_EVENTS)]))
    return [event for event in events if id(event) not in spare]
