"""Decides which row goes to which engine, also after an engine was slow, has refused rows or has died. Pure."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from dataclasses import dataclass, field

SLOW_FACTOR = 3.0
"""A row that takes this many times as long as usual goes to a second engine that has no other work."""
LEAST_SLOW_S = 5.0
_REMEMBERED = 512  # number of durations whose median is the usual one
FAILURES = 2
"""Number of failures, alone on an engine, after which a row becomes an error."""
ENGINE_FAILURES = 3
"""Number of failures in a row after which an engine is given up."""


@dataclass(slots=True)
class RowQueue:
    """Knows the rows that are left, and which engine has which row since when (in seconds of any clock).

    Rows go out in their order. A row that an engine failed with others is a suspect: it goes out again alone, so that
    one bad row costs no good one.
    """

    left: deque[int]
    _held: dict[int, dict[int, float]] = field(default_factory=dict)  # engine -> row -> time when it was given
    _suspects: deque[int] = field(default_factory=deque)
    _failures: dict[int, int] = field(default_factory=dict)  # row -> failures, alone on an engine
    _engine_failures: dict[int, int] = field(default_factory=dict)  # engine -> failures since its last answer
    _durations: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    @property
    def waiting(self) -> int:
        """Count the rows that no engine has."""
        return len(self.left) + len(self._suspects)

    @property
    def unfinished(self) -> int:
        """Count the rows that are not answered."""
        return self.waiting + len({row for rows in self._held.values() for row in rows})

    def held(self, engine: int) -> int:
        """Count the rows that an engine has."""
        return len(self._held.get(engine, {}))

    def take(self, engine: int, now: float) -> int | None:
        """Take the next row for an engine; None: it gets none now."""
        held = self._held.setdefault(engine, {})
        if any(row in self._failures for row in held):
            return None  # a suspect is alone
        row: int | None
        if self._suspects and not held:
            row = self._suspects.popleft()
        elif self.left:
            row = self.left.popleft()
        elif held or (row := self._overdue(engine, now)) is None:
            return None
        held[row] = now
        return row

    def _overdue(self, engine: int, now: float) -> int | None:
        """Find the row that a single other engine has had for longest, if that is much longer than usual."""
        if not self._durations:
            return None
        limit = max(LEAST_SLOW_S, SLOW_FACTOR * statistics.median(self._durations))
        owners = Counter(row for rows in self._held.values() for row in rows)
        late = [
            (since, row)
            for other, rows in self._held.items()
            for row, since in rows.items()
            if other != engine and owners[row] == 1 and now - since > limit and row not in self._failures
        ]
        return min(late)[1] if late else None

    def finish(self, engine: int, row: int, now: float) -> bool:
        """Note an answer; return False if another engine has answered before."""
        self._engine_failures.pop(engine, None)
        since = self._held.get(engine, {}).pop(row, None)
        if since is None:
            return False
        self._durations.append(now - since)
        for rows in self._held.values():
            rows.pop(row, None)
        self._failures.pop(row, None)
        return True

    def fail(self, engine: int, row: int) -> tuple[bool, bool]:
        """Note that an engine failed a row; return whether the row is now an error, and whether the engine is broken.

        An engine drops all of its requests when one fails, so each of its rows comes here.
        """
        held = self._held.get(engine, {})
        if row not in held:
            return False, False
        alone = row in self._failures
        del held[row]
        if not held:  # the last row of this failure
            self._engine_failures[engine] = self._engine_failures.get(engine, 0) + 1
        broken = self._engine_failures.get(engine, 0) >= ENGINE_FAILURES
        if any(row in rows for rows in self._held.values()):
            return False, broken  # the other engine may answer it
        self._failures[row] = self._failures.get(row, 0) + (1 if alone else 0)
        if self._failures[row] >= FAILURES and not broken:
            del self._failures[row]
            return True, False
        self._suspects.append(row)
        return False, broken

    def lose(self, engine: int) -> list[int]:
        """Take back the rows of an engine that is gone; return those that no other engine has. They go out first."""
        rows = self._held.pop(engine, {})
        self._engine_failures.pop(engine, None)
        alone = [row for row in sorted(rows) if not any(row in others for others in self._held.values())]
        for row in reversed(alone):
            (self._suspects if row in self._failures else self.left).appendleft(row)
        return alone
