"""Who said hello: the ranks as the conductor knows them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from slurm_rlhf.control.sockets import Part
from slurm_rlhf.errors import WireError


@dataclass(slots=True, eq=False)
class Peer:
    """One process of a role. A rank that comes back after it was lost is another Peer."""

    role: str
    rank: int
    world: int
    host: str
    pid: int
    phase: str = ""
    """What it is doing, as of its last pulse."""
    lost: str = ""
    """Why it counts as gone; empty as long as it is with us."""
    route: bytes = field(default=b"", repr=False)
    heard: float = field(default=0.0, repr=False)
    """When the last message came, on the server's clock."""
    sent: int = field(default=0, repr=False)
    received: int = field(default=0, repr=False)
    backlog: deque[list[Part]] = field(default_factory=deque, repr=False)
    """Messages for while its connection is broken."""

    def __str__(self) -> str:
        return f"{self.role} rank {self.rank} on {self.host} (pid {self.pid})"


def from_hello(hello: dict[str, Any], route: bytes, now: float) -> Peer:
    """The peer that introduces itself. Raises WireError."""
    match [hello.get(key) for key in ("role", "rank", "world", "host", "pid")]:
        case [str(role), int(rank), int(world), str(host), int(pid)] if role and 0 <= rank < world:
            return Peer(role, rank, world, host, pid, route=route, heard=now)
    raise WireError(f"a hello that introduces nobody: {str(hello)[:200]}")


class Roster:
    """Peers by connection and by name. Not locked: the server does that."""

    def __init__(self) -> None:
        self._by_route: dict[bytes, Peer] = {}
        self._by_name: dict[tuple[str, int], Peer] = {}

    def add(self, peer: Peer) -> None:
        """Takes the place of a lost peer of the same name."""
        self._by_route[peer.route] = peer
        self._by_name[peer.role, peer.rank] = peer

    def at(self, route: bytes) -> Peer | None:
        """The peer behind a connection, lost ones included."""
        return self._by_route.get(route)

    def find(self, role: str, rank: int) -> Peer | None:
        """The newest peer of that name, lost or not."""
        return self._by_name.get((role, rank))

    def of_role(self, role: str) -> list[Peer]:
        """The newest peer of each rank, in rank order, lost ones included."""
        return sorted((peer for peer in self._by_name.values() if peer.role == role), key=lambda peer: peer.rank)

    def present(self) -> Iterator[Peer]:
        """All peers that are not lost."""
        return (peer for peer in list(self._by_name.values()) if not peer.lost)
