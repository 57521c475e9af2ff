"""The best checkpoint of a run, by a metric of its evaluations (ckpt.best_metric)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Best:
    """Says which step was the best so far; more is better, and the first of equal ones."""

    metric: str
    value: float
    step: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def better(best: Best | None, metric: str, metrics: Mapping[str, float], step: int) -> Best | None:
    """Return what is the best once `step` was evaluated with `metrics`; an empty `metric`: nothing is."""
    value = metrics.get(metric, math.nan)
    if not metric or not math.isfinite(value) or (best is not None and value <= best.value):
        return best
    return Best(metric, float(value), step)


def resumed(state: Mapping[str, Any] | None, metric: str, present: bool) -> tuple[Best | None, str]:
    """Read the best of a checkpoint's state, and say why there is none any more; `present`: its checkpoint is there."""
    if not metric or not state:
        return None, ""
    best = Best(**state)
    if best.metric != metric:
        return None, (
            f"ckpt.best_metric was {best.metric} before, and is {metric} now: step {best.step} is no longer kept as "
            "the best, and the best is chosen anew from here on"
        )
    if not present:
        return None, (
            f"the best checkpoint so far, of step {best.step} ({metric} {best.value:.4f}), is not in this run "
            "directory any more: the best is chosen anew from here on"
        )
    return best, ""
