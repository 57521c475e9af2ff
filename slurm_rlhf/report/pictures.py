"""Make curves from metrics.jsonl, the time axis of sessions, events and ranks, and a picture of the nodes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from slurm_rlhf.observe.run_log import BEGINS, CHECKPOINT, ENDS, HANG, REQUEUE, RunEvent
from slurm_rlhf.observe.timing import joined

POINTS = 600
"""Points of a curve at most. If there are more steps, a point is the mean of neighbouring steps."""

INSIDE = ("time/step", "time/sync_transfer", "time/sync_checksum", "time/wake_up", "time/sleep")
"""Times that are sums or parts of other times."""
PHASES = (
    "rollout",
    "reward",
    "forward",
    "advantages",
    "self_check",
    "update",
    "sync",
    "eval",
    "checkpoint",
    "checkpoint_wait",
)
"""Phases of a step in their order; other phases come after them."""
LAST = 20
"""Steps over which the page averages current rates."""


def curves(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return {"steps", "tokens", "seconds", "values": {metric: [...]}}; a missing metric is None.

    "tokens" (of responses) and "seconds" are sums from the first step on; empty if they were not recorded.
    """
    groups = grouped(rows)
    names = sorted({name for row in rows for name, value in row.items() if name != "step" and _is_number(value)})
    values = {name: [mean([row.get(name) for row in group]) for group in groups] for name in names}
    sums = {"tokens": running(groups, "response_tokens"), "seconds": running(groups, "time/step")}
    return {"steps": [int(group[-1]["step"]) for group in groups], **sums, "values": values}


def running(groups: Sequence[Sequence[dict[str, Any]]], name: str) -> list[float]:
    """Add up a metric from the first step to the end of each group; empty if it is never above 0."""
    each = [math.fsum(row[name] for row in group if _is_number(row.get(name))) for group in groups]
    return [rounded(total) for total in accumulate(each)] if any(each) else []


def grouped(rows: Sequence[dict[str, Any]]) -> list[Sequence[dict[str, Any]]]:
    """Split rows into at most `POINTS` groups of neighbours, of equal size except for the last."""
    size = max(1, -(-len(rows) // POINTS))
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def mean(values: Sequence[Any]) -> float | None:
    """Average the values that are numbers, to six digits; None if there are none."""
    numbers = [float(value) for value in values if _is_number(value)]
    return rounded(math.fsum(numbers) / len(numbers)) if numbers else None


def rounded(value: float) -> float:
    """Keep six significant digits."""
    return float(f"{value:.6g}")


def step_times(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the seconds of each step by phase, {"steps", "seconds", "phases": {phase: [...]}}; `other` is the rest."""
    groups = grouped(rows)
    found = {name.removeprefix("time/") for row in rows for name in row if name.startswith("time/")} - {
        name.removeprefix("time/") for name in INSIDE
    }
    phases = [*(name for name in PHASES if name in found), *sorted(found - set(PHASES))]
    shares = {
        name: [mean([row.get(f"time/{name}", 0.0) for row in group]) or 0.0 for group in groups] for name in phases
    }
    seconds = [mean([row.get("time/step") for row in group]) or 0.0 for group in groups]
    # A checkpoint is written between two steps, and its time counts for the later one.
    none = [0.0] * len(groups)
    saves = (shares.get("checkpoint", none), shares.get("checkpoint_wait", none))
    between = [saving + waiting for saving, waiting in zip(*saves, strict=True)]
    known = [sum(shares[name][place] for name in phases) for place in range(len(groups))]
    other = [rounded(max(0.0, s + b - k)) for s, b, k in zip(seconds, between, known, strict=True)]
    return {
        "steps": [int(group[-1]["step"]) for group in groups],
        "seconds": seconds,
        "phases": shares | ({"other": other} if groups else {}),
    }


def latest(rows: Sequence[dict[str, Any]], name: str) -> float | None:
    """Average a metric over the `LAST` steps."""
    return mean([row.get(name) for row in rows[-LAST:]])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


MOST = 512
"""Nodes on the page."""


def nodes(layout: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return {"unit", "nodes": [{"name", "slots": [[rank, ...], ...]}], "left_out"}.

    A rank is {"role", "rank", "engine", "tokens_per_s", "used", "total"}, sizes in bytes; None means not known.
    """
    ranks = layout.get("ranks", {})
    found = [{"name": node["name"], "slots": [[] for _ in range(node["gpus"])]} for node in ranks.get("nodes", [])]
    by_name = {node["name"]: node for node in found}
    memory = layout.get("memory", {})
    for role, shares in ranks.get("roles", {}).items():
        world = sum(len(share["ranks"]) for share in shares)
        for share in shares:
            engines = share.get("engines") or [None] * len(share["ranks"])
            for slot, rank, engine in zip(share["gpus"], share["ranks"], engines, strict=True):
                index, rank_of_engine = engine or (None, 0)
                known = memory.get(role, {}).get(str(rank), {})
                by_name[share["node"]]["slots"][slot].append(
                    {
                        **{"role": role, "rank": rank, "engine": index},
                        # The rate of a whole engine, shown at its first rank.
                        "tokens_per_s": speed(rows, role, world, index) if not rank_of_engine else None,
                        **{"used": known.get("used"), "total": known.get("total")},
                    }
                )
    unit = "GPU" if ranks.get("accelerator") == "gpu" else "slot"
    return {"unit": unit, "nodes": found[:MOST], "left_out": max(0, len(found) - MOST)}


def speed(rows: Sequence[dict[str, Any]], role: str, world: int, engine: int | None) -> float | None:
    """Return response tokens/s: of an engine while it has requests, of a trainer's rank during updates."""
    if engine is not None:
        return latest(rows, f"perf/engine/{engine}/tokens_per_s")
    if role not in ("actor", "critic"):
        return None
    tokens, seconds = latest(rows, "response_tokens"), latest(rows, "time/update")
    return rounded(tokens / seconds / world) if tokens and seconds else None


def weight_sync(layout: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return bytes, seconds, bytes per second and share of the link of a weight update; None means not known."""
    nbytes, seconds = latest(rows, "perf/sync_bytes"), latest(rows, "time/sync_transfer")
    return {
        **layout.get("weight_transfer", {}),
        **{"bytes": nbytes, "seconds": seconds},
        "rate": rounded(nbytes / seconds) if nbytes and seconds else None,
        "link_share": latest(rows, "perf/sync_link_share"),
    }


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
