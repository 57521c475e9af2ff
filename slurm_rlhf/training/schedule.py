"""The learning rate as a pure function of the optimizer step, so that a checkpoint needs to hold only the step."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Schedule:
    kind: str  # constant, linear or cosine
    peak: float
    total_steps: int
    warmup_ratio: float = 0.0  # of total_steps
    min_ratio: float = 0.0  # of peak, where linear and cosine end


def learning_rate(step: int, schedule: Schedule) -> float:
    """Learning rate of optimizer step `step`, 0-based.

    Warm-up over w = ceil(warmup_ratio * total_steps) steps: peak * (step + 1) / w. After it, with
    p = (step - w) / max(total_steps - w - 1, 1), at most 1:
        constant  peak
        linear    peak * (min_ratio + (1 - min_ratio) * (1 - p))
        cosine    peak * (min_ratio + (1 - min_ratio) * (1 + cos(pi * p)) / 2)
    so that the first step after the warm-up has the peak and the last step peak * min_ratio. Steps past the end keep
    the last value. Source of the cosine: Loshchilov and Hutter, SGDR (2017), one period.
    Raises ValueError for another kind.
    """
    warmup = math.ceil(schedule.warmup_ratio * schedule.total_steps)
    if step < warmup:
        return schedule.peak * (step + 1) / warmup
    progress = min((step - warmup) / max(schedule.total_steps - warmup - 1, 1), 1.0)
    if schedule.kind == "constant":
        share = 1.0
    elif schedule.kind == "linear":
        share = 1.0 - progress
    elif schedule.kind == "cosine":
        share = (1.0 + math.cos(math.pi * progress)) / 2.0
    else:
        raise ValueError(f"unknown schedule {schedule.kind!r}; constant, linear and cosine are known")
    return schedule.peak * (schedule.min_ratio + (1.0 - schedule.min_ratio) * share)
