"""The ranks that have said hello, as the conductor knows them: who each is, where, and whether it is still there."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from slurm_rlhf.errors import WireError
from slurm_rlhf.records import Record
from slurm_rlhf.wire.io_thread import Part


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
    silent: bool = False
    """Whether it is lost because it sent no heartbeat."""
    route: bytes = field(default=b"", repr=False)
    heard: float = field(default=0.0, repr=False)
    """Time of its last message, on the server's clock."""
    sent: int = field(default=0, repr=False)
    received: int = field(default=0, repr=False)
    backlog: deque[list[Part]] = field(default_factory=deque, repr=False)
    """Messages to send when its broken connection is back."""

    def __str__(self) -> str:
        return f"{self.role} rank {self.rank} on {self.host} (pid {self.pid})"


class Hello(Record):
    """Introduces a rank, as its first message."""

    role: str
    rank: int
    world: int
    host: str
    pid: int
    start: int = 0  # number of this start of the role, counted by the conductor

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

    def dismiss(self, role: str, reason: str) -> list[Peer]:
        """Give up all peers of a role, and forget their names; their connections stay known. Returns them."""
        dismissed = self.of_role(role)
        for peer in dismissed:
            peer.lost = peer.lost or reason
            del self._by_name[peer.role, peer.rank]
        return dismissed

    def on(self, host: str) -> list[Peer]:
        """Return the newest peer of each rank on a node, lost ones included."""
        return [peer for peer in self._by_name.values() if peer.host == host]

    def present(self) -> Iterator[Peer]:
        """Yield all peers that are not lost."""
        return (peer for peer in list(self._by_name.values()) if not peer.lost)
