"""Make curves from the columns of metrics.jsonl, and a picture of the nodes: the place and speed of each rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

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

    "tokens" of responses and "seconds" are sums from the first step on; empty if they were not recorded.
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
    """Average a metric over the last steps."""
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
