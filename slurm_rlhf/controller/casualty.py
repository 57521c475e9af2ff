"""Who broke a run, and on which node."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_rlhf.cluster.slurm_notation import expand
from slurm_rlhf.config.schema import Timeout
from slurm_rlhf.errors import PlacementError


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


def conductor_stood_still(seconds: float, timeout: Timeout) -> str:
    """Say that ranks ended because the conductor was away for `seconds`; empty: they wait longer than that."""
    if seconds < timeout.heartbeat - timeout.heartbeat_interval:
        return ""
    return (
        f"the conductor stood still for {seconds:.0f} s (stopped by a signal, or its machine was suspended), and the "
        f"ranks, which wait for {timeout.heartbeat:g} s (timeout.heartbeat), left: all are gone, not one role"
    )
