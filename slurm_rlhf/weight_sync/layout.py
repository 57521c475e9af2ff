"""Who takes part in a weight transfer, and where: pure data, the same on all members.

The group counts the actor's ranks first, as the actor does, and then the ranks of the engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slurm_rlhf.errors import SyncError


@dataclass(frozen=True, slots=True)
class Stream:
    """Name a copy of the model on its way: who owns its bytes, and which nodes it goes to."""

    owners: tuple[int, ...]  # actor ranks; each sends a part of every bucket
    nodes: tuple[str, ...]  # with engines; each takes every byte once


@dataclass(frozen=True, slots=True)
class Layout:
    """List the nodes of the members by rank in the group: `actors[i]` is that of rank i, `engines[i]` of rank A + i."""

    actors: tuple[str, ...]
    engines: tuple[str, ...]
    zero_stage: int = 0
    interfaces: tuple[str, ...] = ()  # the network interface of each rank of the group; empty: nobody has a choice

    def __post_init__(self) -> None:
        if not self.actors or not self.engines:
            raise SyncError("a weight transfer needs at least one actor rank and one engine rank")

    @property
    def world(self) -> int:
        return len(self.actors) + len(self.engines)

    def node(self, rank: int) -> str:
        """Return the node of a rank of the group."""
        return (self.actors + self.engines)[rank]

    def near(self, owner: int, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Return those of `ranks` that use the owner's interface; all of them if none does."""
        if not self.interfaces:
            return ranks
        return tuple(rank for rank in ranks if self.interfaces[rank] == self.interfaces[owner]) or ranks

    @property
    def by_node(self) -> dict[str, tuple[int, ...]]:
        """Return the engine ranks of each node, nodes in the order in which they come first."""
        found: dict[str, tuple[int, ...]] = {}
        for rank, node in enumerate(self.engines, len(self.actors)):
            found[node] = (*found.get(node, ()), rank)
        return found


def streams(layout: Layout) -> tuple[Stream, ...]:
    """Return one stream from all actor ranks to all nodes where each rank holds a shard of its own (ZeRO-3).

    Where every rank holds the whole model, nodes that host both roles are served by their own actor ranks, and
    nothing of theirs crosses the network.
    """
    everybody = tuple(range(len(layout.actors)))
    served = tuple(layout.by_node)
    if layout.zero_stage >= 3:
        return (Stream(everybody, served),)
    found: dict[tuple[int, ...], tuple[str, ...]] = {}
    for node in served:
        owners = tuple(rank for rank in everybody if layout.actors[rank] == node) or everybody
        found[owners] = (*found.get(owners, ()), node)
    return tuple(Stream(owners, nodes) for owners, nodes in found.items())


def relays(layout: Layout) -> bool:
    """Tell whether engine nodes hand bytes on to other nodes."""
    return any(
        len(set(stream.nodes) - {layout.actors[owner]}) > distinct([layout.actors[other] for other in stream.owners])
        for stream in streams(layout)
        for owner in stream.owners
    )


def distinct(nodes: Sequence[str]) -> int:
    """Count the different nodes in `nodes`."""
    return len(set(nodes))
