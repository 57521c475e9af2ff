"""The ranks as the conductor knows them, and the calls that wait for their replies."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from slurm_rlhf.control.io_thread import Part
from slurm_rlhf.errors import WireError


@dataclass(slots=True, eq=False)
class Peer:
    """Stands for a process of a role. A rank that comes back after it was lost is another Peer."""

    role: str
    rank: int
    world: int
    host: str
    pid: int
    phase: str = ""
    """Its phase, as of its last pulse."""
    lost: str = ""
    """Reason for which it counts as gone; empty while it does not."""
    route: bytes = field(default=b"", repr=False)
    heard: float = field(default=0.0, repr=False)
    """Time of its last message, on the server's clock."""
    sent: int = field(default=0, repr=False)
    received: int = field(default=0, repr=False)
    backlog: deque[list[Part]] = field(default_factory=deque, repr=False)
    """Messages to send when its broken connection is back."""

    def __str__(self) -> str:
        return f"{self.role} rank {self.rank} on {self.host} (pid {self.pid})"


@dataclass(frozen=True, slots=True)
class Hello:
    """Introduces a rank, as its first message."""

    role: str
    rank: int
    world: int
    host: str
    pid: int

    def peer(self, route: bytes, now: float) -> Peer:
        """Make the peer at the other end of the connection `route`. Raises WireError."""
        if not self.role or not 0 <= self.rank < self.world:
            raise WireError(f"a hello that introduces nobody: {self}")
        return Peer(self.role, self.rank, self.world, self.host, self.pid, route=route, heard=now)


class Roster:
    """Finds peers by connection and by name. Not locked: the server does that."""

    def __init__(self) -> None:
        self._by_route: dict[bytes, Peer] = {}
        self._by_name: dict[tuple[str, int], Peer] = {}

    def add(self, peer: Peer) -> None:
        """Add a peer, in place of a lost one of the same name."""
        self._by_route[peer.route] = peer
        self._by_name[peer.role, peer.rank] = peer

    def at(self, route: bytes) -> Peer | None:
        """Return the peer behind a connection, lost ones included."""
        return self._by_route.get(route)

    def find(self, role: str, rank: int) -> Peer | None:
        """Return the newest peer of that name, lost or not."""
        return self._by_name.get((role, rank))

    def of_role(self, role: str) -> list[Peer]:
        """Return the newest peer of each rank, in rank order, lost ones included."""
        return sorted((peer for peer in self._by_name.values() if peer.role == role), key=lambda peer: peer.rank)

    def present(self) -> Iterator[Peer]:
        """Yield all peers that are not lost."""
        return (peer for peer in list(self._by_name.values()) if not peer.lost)


@dataclass(slots=True)
class Call:
    """Waits for the reply of a peer."""

    id: int
    peer: Peer
    method: str
    timeout_s: float
    read: Callable[[Any], Any]  # makes the result of what has arrived
    future: Future[Any] = field(default_factory=Future)


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

    def add(self, peer: Peer, method: str, timeout_s: float, read: Callable[[Any], Any], now: float) -> Call:
        self._newest += 1
        call = Call(self._newest, peer, method, timeout_s, read)
        call.future.set_running_or_notify_cancel()
        self._calls[call.id] = call
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
