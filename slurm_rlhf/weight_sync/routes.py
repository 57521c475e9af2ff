"""The route of each chunk, and what all routes of a plan cost: pure data, no processes, no torch.

A chunk goes from its owner to heads, from heads to the other nodes, inside a node to the siblings. `balance` says how
many heads there are. With equal links they are min(nodes of its owners, nodes to reach), so that no actor node sends
more than one copy of the model. Rotating heads relay to the nodes that are left, so that they share this work, too. In
a node a rank of those on the owner's network interface takes it from the network and hands it to its siblings: every
node gets it once.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from slurm_rlhf.weight_sync.balance import parents
from slurm_rlhf.weight_sync.transfer_plan import ITEM_SIZE, Part, Stream, SyncPlan

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
    entries: tuple[int, ...]  # the rank of each node that takes it from the network
    givers: tuple[int, ...]  # index in `entries` of the one that each entry gets it from; -1: from the owner
    node_ranks: tuple[tuple[int, ...], ...]  # all engine ranks of the nodes, in the order of `entries`

    @property
    def nbytes(self) -> int:
        return self.high - self.low

    def takers(self, rank: int) -> tuple[int, ...]:
        """Return to whom `rank` hands the chunk."""
        if rank == self.owner:
            return self._from(-1)
        if rank not in self.entries:
            return ()
        at = self.entries.index(rank)
        return self._from(at) + tuple(other for other in self.node_ranks[at] if other != rank)

    def giver(self, rank: int) -> int:
        """Return from whom an engine rank gets it."""
        at = next(index for index, ranks in enumerate(self.node_ranks) if rank in ranks)
        if rank != self.entries[at]:
            return self.entries[at]
        return self.owner if self.givers[at] < 0 else self.entries[self.givers[at]]

    def _from(self, giver: int) -> tuple[int, ...]:
        return tuple(entry for entry, at in zip(self.entries, self.givers, strict=True) if at == giver)


def routes(plan: SyncPlan, bucket: int, stream: int) -> Iterator[Route]:
    """Yield all chunks of a bucket, parts in turn, so that every owner's interface is busy from the start."""
    parts = plan.parts(bucket, stream)
    taking = plan.streams[stream]
    chunks = [_chunks(part, plan.chunk_bytes) for part in parts]
    duty = dict(zip(taking.owners, taking.duties, strict=True))
    # Tags of a sender towards a receiver must differ; streams do not share receivers, parts do not share owners.
    base = (bucket % _TAG_BUCKETS) * _TAGS_OF_BUCKET
    for turn in range(max(map(len, chunks))):
        for part, cut in zip(parts, chunks, strict=True):
            if turn >= len(cut):
                continue
            low, high = cut[turn]
            mine = duty[part.owner]
            seat = turn + part.index if mine.seat < 0 else mine.seat
            way = _way(plan, stream, part.owner, (turn + part.index + bucket) % mine.starts, seat)
            yield Route(part.owner, low, high, base + turn * len(parts) + part.index, *way)


def _chunks(part: Part, size: int) -> list[tuple[int, int]]:
    """Cut a part into chunks, its header last: so the others are on their way before all checksums are known."""
    pieces = [(piece.offset, piece.offset + piece.span.nbytes) for piece in part.apart]
    end = part.start + part.nbytes
    return pieces + [(low, min(low + size, end)) for low in range(part.start, end, size)]


Way = tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[int, ...], ...]]
"""The last three fields of a `Route`."""


def _way(plan: SyncPlan, stream: int, owner: int, turn: int, seat: int) -> Way:
    """Return the way of a chunk from `owner`; `turn` says which node is first, `seat` which ranks take it."""
    seat %= _seats(plan, owner)
    key = (stream, owner, turn, seat)
    if key not in plan.ways:
        taking, home = plan.streams[stream], plan.layout.actors[owner]
        duty, others = taking.duties[taking.owners.index(owner)], taking.others(home)
        shift = (duty.first + turn) % max(len(others), 1)
        order = (*others[shift:], *others[:shift])
        givers = parents(len(order), duty.copies)
        if home in taking.nodes:  # which the owner serves besides
            order, givers = (*order, home), (*givers, -1)
        ranks = plan.layout.by_node
        near = [plan.layout.near(owner, ranks[node]) for node in order]
        entries = tuple(those[seat % len(those)] for those in near)
        plan.ways[key] = (entries, givers, tuple(ranks[node] for node in order))
    return plan.ways[key]


def _seats(plan: SyncPlan, owner: int) -> int:
    """Return after how many turns the same ranks of all nodes take a chunk again."""
    if owner not in plan.seats:
        sizes = (len(plan.layout.near(owner, ranks)) for ranks in plan.layout.by_node.values())
        plan.seats[owner] = math.lcm(*sizes)
    return plan.seats[owner]


def partners(plan: SyncPlan, rank: int) -> tuple[int, ...]:
    """Return with whom a rank may exchange chunks, ranks of its own node too."""
    found: set[int] = set()
    for stream, taking in enumerate(plan.streams):
        for owner, duty in zip(taking.owners, taking.duties, strict=True):
            seats = range(_seats(plan, owner)) if duty.seat < 0 else (duty.seat,)
            for turn, seat in product(range(duty.starts), seats):
                route = Route(owner, 0, 0, 0, *_way(plan, stream, owner, turn, seat))
                found.update(route.takers(rank))
                if any(rank in ranks for ranks in route.node_ranks):
                    found.add(route.giver(rank))
    return tuple(sorted(found))


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes of one update, headers left out. Turns that rotate count as shared evenly."""

    payload: int  # of the parameters
    sent: dict[int, float]  # by rank of the group, relays and copies inside the node included
    received: dict[int, float]
    out: dict[str, float]  # by node, over its network link
    into: dict[str, float]
    inside: dict[str, float]  # by node, between its own ranks

    def seconds(
        self, network: float = _NETWORK, inside: float = _INSIDE, of_nodes: Mapping[str, float] | None = None
    ) -> float:
        """Return the time of the busiest link, at rates in bytes/s in each direction. `of_nodes`: that have others.

        Links work side by side, so the longest counts; what chunks wait for each other is not in it (6 % on links of
        400 Mbit/s).
        """
        rates = of_nodes or {}
        loads = [*self.out.items(), *self.into.items()]
        crossing = max((nbytes / rates.get(node, network) for node, nbytes in loads), default=0.0)
        return max(crossing, max([*self.inside.values(), 0]) / inside)


def cost_of(plan: SyncPlan) -> Cost:
    """Add up `routes` over all of `plan`, without following each chunk."""
    found = Cost(plan.payload, *(defaultdict(float) for _ in range(5)))
    ranks = plan.layout.by_node
    for stream in plan.streams:
        owned = _owned(plan, stream)
        handed_on: dict[str, float] = defaultdict(float)  # by node, what others relay to and from, about
        homes: dict[str, float] = defaultdict(float)
        for (owner, nbytes), duty in zip(owned.items(), stream.duties, strict=True):
            home = plan.layout.actors[owner]
            homes[home] += nbytes
            others = stream.others(home)
            found.sent[owner] += nbytes * (duty.copies + (home in stream.nodes))
            found.out[home] += nbytes * duty.copies
            if home in stream.nodes:
                found.inside[home] += nbytes
            # Some copies come from the owner; the nodes take turns in relaying the rest.
            for node in others:
                handed_on[node] += nbytes * (len(others) - duty.copies) / len(others)
        total = sum(owned.values())
        for node in stream.nodes:
            relayed = handed_on[node]
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
        return {owner: plan.payload * stream.share(owner) for owner in stream.owners}
    owned: Counter[int] = Counter()
    for parameter in plan.parameters:
        step = -(-parameter.numel // count)
        for place, owner in enumerate(stream.owners):
            elements = min(step, parameter.numel - place * step)
            if elements <= 0:
                break
            owned[owner] += elements * ITEM_SIZE[parameter.dtype]
    return {owner: float(owned[owner]) for owner in stream.owners}
