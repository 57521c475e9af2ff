"""The calls of the conductor that wait for an answer, by number and by deadline."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from slurm_rlhf.wire.codec import Reader
from slurm_rlhf.wire.messages import Peer

LOOKING = frozenset({"stacks", "written"})
"""Calls that change nothing: their answers are no sign that the run makes progress."""

_FORGOTTEN = 256  # deadlines of ended calls that are kept at most, besides one for each open call


@dataclass(slots=True)
class Call:
    """Waits for the reply of a peer."""

    id: int
    peer: Peer
    method: str
    timeout_s: float
    read: Reader  # decodes the result
    since: float  # on the server's clock
    future: Future[Any] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class Flight:
    """Describes a call that was not answered yet."""

    peer: Peer
    method: str
    seconds: float  # since it was sent
    timeout_s: float


class PendingCalls:
    """Finds calls by id and by deadline. Not locked: the server does that.

    A deadline is a limit on silence: it counts from the call, or from the peer's last reply to the same method if
    that is later. So many calls can be queued at one rank, and none expires while the rank works them off.
    """

    def __init__(self) -> None:
        self._calls: dict[int, Call] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._last_reply: dict[tuple[Peer, str], float] = {}
        self._newest = 0

    def add(self, peer: Peer, method: str, timeout_s: float, read: Reader, now: float) -> Call:
        self._newest += 1
        call = Call(self._newest, peer, method, timeout_s, read, now)
        call.future.set_running_or_notify_cancel()
        self._calls[call.id] = call
        if len(self._deadlines) > 2 * len(self._calls) + _FORGOTTEN:
            # Calls that are answered leave theirs behind, and deadlines are hours.
            self._deadlines = [each for each in self._deadlines if each[1] in self._calls]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (now + timeout_s, call.id))
        return call

    def answered(self, id: int, peer: Peer, now: float) -> Call | None:
        """Take the call that `peer` replied to; None: it was given up, or never made to this peer."""
        call = self._calls.get(id)
        if call is None or call.peer is not peer:
            return None
        self._last_reply[peer, call.method] = now
        return self._calls.pop(id)

    def was_made(self, id: int) -> bool:
        return 0 < id <= self._newest

    def expired(self, now: float) -> list[Call]:
        """Take the calls that are past their deadline."""
        calls = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, id = heapq.heappop(self._deadlines)
            call = self._calls.get(id)
            if call is None:
                continue
            renewed = self._last_reply.get((call.peer, call.method), 0.0) + call.timeout_s
            if renewed > now:
                heapq.heappush(self._deadlines, (renewed, id))
            else:
                calls.append(self._calls.pop(id))
        return calls

    def flights(self, now: float) -> list[Flight]:
        """List the calls, the oldest first, but for those that only look."""
        calls = [call for call in self._calls.values() if call.method not in LOOKING]
        return [Flight(call.peer, call.method, now - call.since, call.timeout_s) for call in calls]

    def next_deadline(self) -> float | None:
        while self._deadlines and self._deadlines[0][1] not in self._calls:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def take(self, which: Callable[[Call], bool]) -> list[Call]:
        """Take the calls for which `which` holds."""
        calls = [call for call in self._calls.values() if which(call)]
        for call in calls:
            del self._calls[call.id]
        return calls
