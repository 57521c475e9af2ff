"""Who broke a run, and on which node."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from slurm_rlhf.cluster.slurm_notation import expand
from slurm_rlhf.config.schema import Timeout
from slurm_rlhf.errors import PlacementError
from slurm_rlhf.placement.rank_map import NodeShare
from slurm_rlhf.wire.roster import Peer


@dataclass(frozen=True, slots=True)
class FailedRole:
    """Says which role broke a run."""

    role: str
    nodes: tuple[str, ...] = ()  # on one of these; empty: that is not known
    silent: bool = False  # it was given up, and perhaps with its node


def names_of(nodes: str) -> list[str]:
    """List the nodes of an `Ended`; another launcher may have written something that is no list."""
    try:
        return expand(nodes)
    except PlacementError:
        return [nodes]


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
