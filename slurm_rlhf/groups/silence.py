"""Knows which ranks and nodes are not heard: when a node dies, nothing else tells of it."""

from __future__ import annotations

from collections.abc import Callable, Collection

from slurm_rlhf.config.schema_jobs import Timeout
from slurm_rlhf.wire import timeouts
from slurm_rlhf.wire.handles import ControlServer
from slurm_rlhf.wire.messages import Peer

SILENT_BEATS = 3  # number of missed heartbeats that is no accident


class Silence:
    """Looks for silent ranks among those of a run."""

    def __init__(self, server: ControlServer, roles: Collection[str], timeout: Timeout) -> None:
        self._server = server
        self._roles = roles
        self._timeout = timeout

    @property
    def patience_s(self) -> float:
        """Return how long it takes to see that a rank is silent."""
        return max(timeouts.VERDICT_S, (SILENT_BEATS + 1) * self._timeout.heartbeat_interval)

    @property
    def enough_s(self) -> float:
        """Return how long a silence has to be that is evidence, together with something that broke."""
        return self._timeout.heartbeat / 2

    def ranks(self, seconds: float | None = None) -> list[Peer]:
        """List the ranks that are silent, or were for so many seconds."""
        return self._server.silent(SILENT_BEATS * self._timeout.heartbeat_interval if seconds is None else seconds)

    def heard_nodes(self) -> set[str]:
        """List the nodes of which some rank is heard."""
        return heard_nodes(self._peers(), self.ranks())

    def nodes(self, dead: Collection[str]) -> set[str]:
        """List the nodes of which no rank is heard any more, or ever was: those in `dead`."""
        return silent_nodes(self._peers(), self.ranks(), dead)

    def _peers(self) -> list[Peer]:
        return [peer for role in self._roles for peer in self._server.peers(role)]


def conductor_stood_still(absence_s: Callable[[float], float], timeout: Timeout) -> str:
    """Say that ranks ended because the conductor was away; empty: they wait longer than it was.

    `absence_s`: how long it was, if that is no longer ago than so many seconds.
    """
    seconds = absence_s(timeout.heartbeat)
    if seconds < timeout.heartbeat - timeout.heartbeat_interval:
        return ""
    return (
        f"the conductor stood still for {seconds:.0f} s (stopped by a signal, or its machine was suspended), and the "
        f"ranks, which wait for {timeout.heartbeat:g} s (timeout.heartbeat), left: all are gone, not one role"
    )


def heard_nodes(peers: Collection[Peer], quiet: Collection[Peer]) -> set[str]:
    """Return the nodes of which some rank is heard. `quiet`: those of `peers` that were not heard lately."""
    return {peer.host for peer in peers if not peer.lost and peer not in quiet}


def silent_nodes(peers: Collection[Peer], quiet: Collection[Peer], dead: Collection[str] = ()) -> set[str]:
    """Return the nodes of which no rank is heard any more, or ever was: those in `dead`.

    A rank that was killed says nothing of its node, and neither does one that has not said hello yet: it may import.
    """
    return {*dead, *(peer.host for peer in peers if peer.silent or peer in quiet)} - heard_nodes(peers, quiet)
