"""Can the nodes of a group reach each other on the addresses they gave? Asked before anything waits on it."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from slurm_rlhf.weight_sync.member import Member

_PROBES = 16  # at a time
_BACKLOG = 4096


def listen(address: str) -> socket.socket:
    """A socket that others can knock at; nobody answers. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=_BACKLOG)


def first_of_each(members: Iterable[Member]) -> list[Member]:
    """One member per host and address: what one of them can reach the others there can, too."""
    found: dict[tuple[str, str], Member] = {}
    for member in members:
        found.setdefault((member.host, member.address), member)
    return list(found.values())


def unreachable(me: Member, members: Sequence[Member], timeout_s: float) -> str:
    """What this member cannot reach, and the remedy; empty when all is well. Knocks at one member per host."""
    others = [other for other in first_of_each(members) if other.host != me.host]
    if not others or me.rank not in [member.rank for member in first_of_each(members)]:
        return ""
    with ThreadPoolExecutor(min(_PROBES, len(others))) as threads:
        failures = [text for text in threads.map(lambda other: _knock(me, other, timeout_s), others) if text]
    return "; ".join(failures[:3])


def _knock(me: Member, other: Member, timeout_s: float) -> str:
    try:
        socket.create_connection((other.address, other.port), timeout_s, (me.address, 0)).close()
    except OSError as error:
        return (
            f"{me.host} ({me.interface}, {me.address}) cannot reach {other.host} ({other.interface}, "
            f"{other.address}): {error.strerror or error}. Set sync.interface to a network that joins both nodes, "
            f"or leave it empty to take the one that reaches {other.host}"
        )
    return ""
