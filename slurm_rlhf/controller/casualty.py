"""Who broke a run, and on which node."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from slurm_rlhf.cluster.slurm_notation import expand
from slurm_rlhf.config.schema import Timeout
from slurm_rlhf.errors import PlacementError
from slurm_rlhf.placement.rank_map import NodeShare


@dataclass(frozen=True, slots=True)
class Casualty:
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


def unheard(shares: Sequence[NodeShare], here: Collection[int], hosts: Collection[str]) -> dict[str, int]:
    """Return the nodes that are dead where ranks of a role did not say hello in time, each with its first such rank.

    `here`: those that did. `hosts`: nodes from which any rank of any role did. Empty: it is no matter of nodes, for a
    rank is missing whose node was heard of, or there is none that was.
    """
    missing = {
        share.node: min(rank for rank in share.ranks if rank not in here)
        for share in shares
        if {*share.ranks} - {*here}
    }
    return {} if not hosts or missing.keys() & {*hosts} else missing
