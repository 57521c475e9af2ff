"""The route of each chunk, and what all routes of a plan cost: pure data, no processes, no torch.

A chunk goes from its owner to heads, from heads to the other nodes, inside a node to the siblings. It leaves the actor
min(nodes of its owners, nodes to reach) times, so that no actor node sends more than one copy of the model; rotating
heads relay it to the nodes that are left, so that they share this work, too. In a node a rotating rank, of those on the
owner's network interface, takes it from the network and hands it to its siblings: every node gets it once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from slurm_rlhf.weight_sync.transfer_plan import ITEM_SIZE, Stream, SyncPlan, distinct

_TAG_BUCKETS = 32  # more than are on their way at a time
_TAGS_OF_BUCKET = 1 << 24
_NETWORK, _INSIDE = 25e9, 100e9


@dataclass(frozen=True, slots=True)
class Route:
    """Tell of one chunk of a bucket in a stream who hands it to whom."""

    owner: int
    low: int  # bytes of the bucket's buffer
    high: int
    tag: int  # no two chunks of an update have the same from the same sender
    entries: tuple[int, ...]  # the rank of each node that takes it from the network, heads first
    heads: int  # how many of `entries` get it from the owner
    node_ranks: tuple[tuple[int, ...], ...]  # all engine ranks of the nodes, in the order of `entries`
    local: int  # index in `entries` of the owner's own node, which the owner serves besides the heads; -1: none

    @property
    def nbytes(self) -> int:
        return self.high - self.low

    def takers(self, rank: int) -> tuple[int, ...]:
        """Return to whom `rank` hands the chunk."""
        if rank == self.owner:
            return self.entries[: self.heads] + self._at(self.local)
        if rank not in self.entries:
            return ()
        at = self.entries.index(rank)
        siblings = tuple(other for other in self.node_ranks[at] if other != rank)
        return (self._relayed(at) if at < self.heads else ()) + siblings

    def giver(self, rank: int) -> int:
        """Return from whom an engine rank gets it."""
        at = next(index for index, ranks in enumerate(self.node_ranks) if rank in ranks)
        if rank != self.entries[at]:
            return self.entries[at]
        if at < self.heads or at == self.local:
            return self.owner
        return self.entries[at % self.heads]

    def _relayed(self, head: int) -> tuple[int, ...]:
        end = len(self.entries) - (1 if self.local >= 0 else 0)
        return self.entries[head + self.heads : end : self.heads]

    def _at(self, index: int) -> tuple[int, ...]:
        return () if index < 0 else (self.entries[index],)


def routes(plan: SyncPlan, bucket: int, stream: int) -> Iterator[Route]:
    """Yield all chunks of a bucket, parts in turn, so that every owner's interface is busy from the start."""
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
            entries = tuple(those[(turn + part.index) % len(those)] for those in near)
            tag = base + turn * len(parts) + part.index
            yield Route(part.owner, low, high, tag, entries, heads, tuple(ranks[node] for node in order), local)


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes of one update, headers left out. Turns that rotate count as shared evenly."""

    payload: int  # of the parameters
    sent: dict[int, float]  # by rank of the group, relays and copies inside the node included
    received: dict[int, float]
    out: dict[str, float]  # by node, over its network link
    into: dict[str, float]
    inside: dict[str, float]  # by node, between its own ranks

    def seconds(self, network: float = _NETWORK, inside: float = _INSIDE) -> float:
        """Return the time of the busiest link, at rates in bytes/s in each direction.

        Links work side by side, so the longest counts; what chunks wait for each other is not in it (6 % on links of
        400 Mbit/s).
        """
        crossing = max([*self.out.values(), *self.into.values(), 0]) / network
        return max(crossing, max([*self.inside.values(), 0]) / inside)


def cost_of(plan: SyncPlan) -> Cost:
    """Add up `routes` over all of `plan`, without following each chunk."""
    found = Cost(plan.payload, *(defaultdict(float) for _ in range(5)))
    ranks = plan.layout.by_node
    for stream in plan.streams:
        owned = _owned(plan, stream)
        actor_nodes = distinct([plan.layout.actors[owner] for owner in stream.owners])
        homes: dict[str, float] = defaultdict(float)
        for owner, nbytes in owned.items():
            home = plan.layout.actors[owner]
            homes[home] += nbytes
            others = len(stream.nodes) - (home in stream.nodes)
            heads = min(actor_nodes, others)
            found.sent[owner] += nbytes * (heads + (home in stream.nodes))
            found.out[home] += nbytes * heads
            if home in stream.nodes:
                found.inside[home] += nbytes
        total = sum(owned.values())
        for node in stream.nodes:
            # Some copies come from the owner; the nodes take turns in relaying the rest.
            relayed = sum(
                nbytes * (others - min(actor_nodes, others)) / others
                for home, nbytes in homes.items()
                if home != node and (others := len(stream.nodes) - (home in stream.nodes))
            )
            siblings = total * (len(ranks[node]) - 1)
            found.into[node] += total - homes[node]
            found.out[node] += relayed
            found.inside[node] += siblings
            for rank in ranks[node]:
                found.sent[rank] += (relayed + siblings) / len(ranks[node])
                found.received[rank] += total
    return found


def _owned(plan: SyncPlan, stream: Stream) -> dict[int, float]:
    """Return the bytes of the model that each owner sends."""
    count = len(stream.owners)
    if plan.layout.zero_stage < 3:
        return dict.fromkeys(stream.owners, plan.payload / count)
    owned: Counter[int] = Counter()
    for parameter in plan.parameters:
        step = -(-parameter.numel // count)
        for place, owner in enumerate(stream.owners):
            elements = min(step, parameter.numel - place * step)
            if elements <= 0:
                break
            owned[owner] += elements * ITEM_SIZE[parameter.dtype]
    return {owner: float(owned[owner]) for owner in stream.owners}
