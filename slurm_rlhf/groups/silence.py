"""Knows which ranks and nodes are not heard: when a node dies, nothing else tells of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future

from slurm_rlhf.config.schema_jobs import Timeout
from slurm_rlhf.nodes.launcher import Launcher
from slurm_rlhf.placement.rank_map import NodeShare
from slurm_rlhf.polling import in_thread
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

    def heard_nodes(self, seconds: float | None = None) -> set[str]:
        """List the nodes of which some rank is heard."""
        return heard_nodes(self._peers(), self.ranks(seconds))

    def nodes(self, dead: Collection[str]) -> set[str]:
        """List the nodes of which no rank is heard any more, or ever was: those in `dead`."""
        return silent_nodes(self._peers(), self.ranks(), dead)

    def _peers(self) -> list[Peer]:
        return [peer for role in self._roles for peer in self._server.peers(role)]


class Unreached:
    """Finds out in the background on which nodes nothing can be started any more."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._asked: dict[tuple[str, ...], Future[list[str]]] = {}

    def among(self, nodes: Sequence[str]) -> list[str]:
        """Return those of `nodes`, asking for each set of nodes once; empty until that is known."""
        asked = self._asked.get(tuple(nodes))
        if asked is None and nodes:
            self._asked[tuple(nodes)] = in_thread(lambda: self._launcher.unreached(nodes), "unreached")
        return asked.result() if asked is not None and asked.done() and not asked.exception() else []

    def forget(self) -> None:
        """Ask anew from now on: roles start again."""
        self._asked.clear()


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


def unheard(
    shares: Sequence[NodeShare],
    here: Collection[int],
    hosts: Collection[str],
    unreached: Callable[[Sequence[str]], Collection[str]],
) -> list[NodeShare]:
    """Return the parts of a role on dead nodes, where ranks did not say hello in time; empty: it is not known which.

    `here`: the ranks that did. `hosts`: nodes of which any rank of any role is heard now: one that was heard before may
    have died since. Torchruns wait for each other, so ranks are missing on good nodes as well; the dead one is the only
    one of which nobody at all is heard. Where several are, `unreached` tells those where nothing can be started.
    """
    silent = [share for share in shares if {*share.ranks} - {*here} and share.node not in hosts]
    if len(silent) > 1:
        gone = unreached([share.node for share in silent])
        return [share for share in silent if share.node in gone]
    return silent if hosts else []


def heard_nodes(peers: Collection[Peer], quiet: Collection[Peer]) -> set[str]:
    """Return the nodes of which some rank is heard. `quiet`: those of `peers` that were not heard lately."""
    return {peer.host for peer in peers if not peer.lost and peer not in quiet}


def silent_nodes(peers: Collection[Peer], quiet: Collection[Peer], dead: Collection[str] = ()) -> set[str]:
    """Return the nodes of which no rank is heard any more, or ever was: those in `dead`.

    A rank that was killed says nothing of its node, and neither does one that has not said hello yet: it may import.
    """
    return {*dead, *(peer.host for peer in peers if peer.silent or peer in quiet)} - heard_nodes(peers, quiet)
