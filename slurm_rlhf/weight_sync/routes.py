"""The way of each chunk: from its owner to heads, from heads to the other nodes, inside a node to the siblings.

A chunk leaves the actor min(nodes of its owners, nodes to reach) times, so that no actor node sends more than one copy
of the model; rotating heads relay it to the nodes that are left, so that they share this work, too. In a node a
rotating rank, of those on the owner's rail, takes it from the wire and hands it to its siblings: over the network
every node gets it once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slurm_rlhf.weight_sync.layout import distinct
from slurm_rlhf.weight_sync.plan import SyncPlan

_TAG_BUCKETS = 32  # more than are on their way at a time
_TAGS_OF_BUCKET = 1 << 24


@dataclass(frozen=True, slots=True)
class Route:
    """One chunk of a bucket in a stream, and who hands it to whom."""

    owner: int
    low: int  # bytes of the bucket's buffer
    high: int
    tag: int  # no two chunks of an update have the same from the same sender
    lanes: tuple[int, ...]  # the rank of each node that takes it from the wire, heads first
    heads: int  # how many of `lanes` get it from the owner
    node_ranks: tuple[tuple[int, ...], ...]  # all engine ranks of the nodes, in the order of `lanes`
    local: int  # index in `lanes` of the owner's own node, which the owner serves besides the heads; -1: none

    @property
    def nbytes(self) -> int:
        return self.high - self.low

    def takers(self, rank: int) -> tuple[int, ...]:
        """To whom `rank` hands the chunk."""
        if rank == self.owner:
            return self.lanes[: self.heads] + self._at(self.local)
        if rank not in self.lanes:
            return ()
        at = self.lanes.index(rank)
        siblings = tuple(other for other in self.node_ranks[at] if other != rank)
        return (self._relayed(at) if at < self.heads else ()) + siblings

    def giver(self, rank: int) -> int:
        """From whom an engine rank gets it."""
        at = next(index for index, ranks in enumerate(self.node_ranks) if rank in ranks)
        if rank != self.lanes[at]:
            return self.lanes[at]
        if at < self.heads or at == self.local:
            return self.owner
        return self.lanes[at % self.heads]

    def _relayed(self, head: int) -> tuple[int, ...]:
        end = len(self.lanes) - (1 if self.local >= 0 else 0)
        return self.lanes[head + self.heads : end : self.heads]

    def _at(self, index: int) -> tuple[int, ...]:
        return () if index < 0 else (self.lanes[index],)


def routes(plan: SyncPlan, bucket: int, stream: int) -> Iterator[Route]:
    """All chunks of a bucket, parts in turn, so that every owner's rail is busy from the start."""
    parts = plan.parts(bucket, stream)
    taking = plan.streams[stream]
    ranks = plan.layout.by_node
    actor_nodes = distinct([plan.layout.actors[owner] for owner in taking.owners])
    counts = [-(-part.nbytes // plan.chunk_bytes) for part in parts]
    # Tags of a sender towards a receiver must differ; streams do not share receivers, parts do not share owners.
    base = (bucket % _TAG_BUCKETS) * _TAGS_OF_BUCKET
    for turn in range(max(counts)):
        for part, count in zip(parts, counts, strict=True):
            if turn >= count:
                continue
            low = part.start + turn * plan.chunk_bytes
            high = min(low + plan.chunk_bytes, part.start + part.nbytes)
            home = plan.layout.actors[part.owner]
            others = [node for node in taking.nodes if node != home]
            shift = (turn + part.index + bucket) % max(len(others), 1)
            order = others[shift:] + others[:shift]
            heads = min(actor_nodes, len(others))
            local = len(order) if home in taking.nodes else -1
            order += [home] if local >= 0 else []
            near = [plan.layout.near(part.owner, ranks[node]) for node in order]
            lanes = tuple(rail[(turn + part.index) % len(rail)] for rail in near)
            tag = base + turn * len(parts) + part.index
            yield Route(part.owner, low, high, tag, lanes, heads, tuple(ranks[node] for node in order), local)
