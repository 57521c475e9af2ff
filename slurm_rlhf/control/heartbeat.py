"""When heartbeats are due, and how long the I/O thread may sleep until then."""

from __future__ import annotations

from slurm_rlhf.errors import ConfigError

_INTERVALS_PER_LIMIT = 4


class Heartbeat:
    """One beat per `interval` seconds; `limit` seconds of silence mean that the other side is lost."""

    def __init__(self, interval: float, limit: float) -> None:
        if not 0 < interval * _INTERVALS_PER_LIMIT <= limit:
            raise ConfigError(
                f"timeout.heartbeat_interval = {interval:g} and timeout.heartbeat = {limit:g} do not go together: "
                f"the interval must be above 0 and at most 1/{_INTERVALS_PER_LIMIT} of the limit"
            )
        self.interval = interval
        self.limit = limit
        self.longest_round = limit / _INTERVALS_PER_LIMIT
        """The I/O loop is back within `interval`; a round that takes longer than this was no time spent listening."""
        self._next = 0.0

    def due(self, now: float) -> bool:
        """True once per interval."""
        if now < self._next:
            return False
        self._next = now + self.interval
        return True

    def wait_ms(self, now: float, deadline: float | None = None) -> int:
        """Until the next beat or `deadline`, whichever is sooner, in ms rounded up: never a busy loop."""
        until = self._next if deadline is None else min(self._next, deadline)
        return max(0, int((until - now) * 1000) + 1)
