"""Measures what an engine does while it has requests."""

from __future__ import annotations

import time

from slurm_rlhf.records import EngineLoad
from slurm_rlhf.rollout.engine import Gauges


class Meter:
    """The rollout role's step loop calls it around every step; the time between two steps counts, too."""

    def __init__(self) -> None:
        self._load = EngineLoad()
        self._since: float | None = None  # up to here is counted; None: no requests
        self._sampled = 0

    def begin(self) -> None:
        """A step is about to start."""
        if self._since is None:
            self._since = time.monotonic()

    def stepped(self, gauges: Gauges, landed: int) -> None:
        """A step is over, and `landed` responses with it."""
        assert self._since is not None
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        self._load.add(
            EngineLoad(
                tokens=gauges.sampled - self._sampled,
                responses=landed,
                steps=1,
                busy_s=seconds,
                queued_s=gauges.waiting * seconds,
                kv_usage=gauges.kv_usage,
            )
        )
        self._sampled = gauges.sampled

    def rest(self) -> None:
        """No requests are left."""
        self._since = None

    def take(self) -> EngineLoad:
        """Everything since the last call."""
        taken, self._load = self._load, EngineLoad()
        return taken
