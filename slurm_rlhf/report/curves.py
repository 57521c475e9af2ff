"""Make curves over the steps of the columns of metrics.jsonl, with at most `POINTS` points each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

POINTS = 600
"""Of a curve. Where there are more steps, each point is the mean over as many neighbours."""

INSIDE = ("time/step", "time/sync_transfer", "time/sync_checksum", "time/wake_up", "time/sleep")
"""Times that are the sum of others, or a part of another one."""
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
"""The phases of a step, in their order; others come behind."""
LAST = 20
"""Steps over which the page's present rates are averaged."""


def curves(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return {"steps", "tokens", "seconds", "values": {metric: [...]}}; a metric that a step lacks is None there.

    tokens, seconds: of all responses, and of all steps, up to and with that step; empty where they were not recorded.
    """
    groups = grouped(rows)
    names = sorted({name for row in rows for name, value in row.items() if name != "step" and _is_number(value)})
    values = {name: [mean([row.get(name) for row in group]) for group in groups] for name in names}
    sums = {"tokens": running(groups, "response_tokens"), "seconds": running(groups, "time/step")}
    return {"steps": [int(group[-1]["step"]) for group in groups], **sums, "values": values}


def running(groups: Sequence[Sequence[dict[str, Any]]], name: str) -> list[float]:
    """Add up a metric from the first step to the end of each group; empty where it is nowhere above 0."""
    each = [math.fsum(row[name] for row in group if _is_number(row.get(name))) for group in groups]
    return [rounded(total) for total in accumulate(each)] if any(each) else []


def grouped(rows: Sequence[dict[str, Any]]) -> list[Sequence[dict[str, Any]]]:
    """Cut rows into at most `POINTS` groups of neighbours, of equal size but for the last."""
    size = max(1, -(-len(rows) // POINTS))
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def mean(values: Sequence[Any]) -> float | None:
    """Average what is a number, to six digits; None where nothing is."""
    numbers = [float(value) for value in values if _is_number(value)]
    return rounded(math.fsum(numbers) / len(numbers)) if numbers else None


def rounded(value: float) -> float:
    """Keep six significant digits."""
    return float(f"{value:.6g}")


def step_times(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return where the seconds of each step go: {"steps", "seconds", "phases": {phase: [...]}}; `other` is the rest."""
    groups = grouped(rows)
    found = {name.removeprefix("time/") for row in rows for name in row if name.startswith("time/")} - {
        name.removeprefix("time/") for name in INSIDE
    }
    phases = [*(name for name in PHASES if name in found), *sorted(found - set(PHASES))]
    shares = {
        name: [mean([row.get(f"time/{name}", 0.0) for row in group]) or 0.0 for group in groups] for name in phases
    }
    seconds = [mean([row.get("time/step") for row in group]) or 0.0 for group in groups]
    # A checkpoint is written between two steps, and counted with the later one.
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
