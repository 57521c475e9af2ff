"""The route of each chunk, and what all routes of a plan cost: pure data, no processes, no torch.

Owners send each chunk to every node that takes it. In a node one of the ranks takes it from the network and hands it to
its siblings: every node gets it once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from slurm_rlhf.config.model_directory import sent_parameters
from slurm_rlhf.config.roles import has_engines
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ModelError
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.placement.topology import GPU
from slurm_rlhf.weights.transfer_plan import BucketPart, SyncPlan, TransferLayout, make_plan

_TAG_BUCKETS = 32  # tags for buckets; fewer buckets are on their way at a time
_TAGS_OF_BUCKET = 1 << 24


@dataclass(frozen=True, slots=True)
class Route:
    """Say which ranks hand one chunk of a bucket to which others."""

    owner: int
    low: int  # bytes of the bucket's buffer
    high: int
    tag: int  # no two chunks of an update have the same from the same sender
    entries: tuple[int, ...]  # the rank of each node that takes it from the owner
    node_ranks: tuple[tuple[int, ...], ...]  # all engine ranks of the nodes, in the order of `entries`

    def takers(self, rank: int) -> tuple[int, ...]:
        """Return to whom `rank` hands the chunk."""
        if rank == self.owner:
            return self.entries
        if rank not in self.entries:
            return ()
        return tuple(other for other in self.node_ranks[self.entries.index(rank)] if other != rank)

    def giver(self, rank: int) -> int:
        """Return from whom an engine rank gets it."""
        if rank in self.entries:
            return self.owner
        return next(entry for entry, ranks in zip(self.entries, self.node_ranks, strict=True) if rank in ranks)


def routes(plan: SyncPlan, bucket: int, stream: int) -> Iterator[Route]:
    """Yield all chunks of a bucket, parts in turn, so that every owner's interface is busy from the start."""
    parts = plan.parts(bucket, stream)
    chunks = [_chunks(part, plan.chunk_bytes) for part in parts]
    by_node = plan.layout.by_node
    node_ranks = tuple(by_node[node] for node in plan.streams[stream].nodes)
    entries = [_entries(plan, stream, part.owner) for part in parts]
    # Tags of a sender towards a receiver must differ; streams do not share receivers, parts do not share owners.
    base = (bucket % _TAG_BUCKETS) * _TAGS_OF_BUCKET
    for turn in range(max(map(len, chunks))):
        for part, cut, taking in zip(parts, chunks, entries, strict=True):
            if turn < len(cut):
                tag = base + turn * len(parts) + part.index
                mine = tuple(ranks[(turn + bucket) % len(ranks)] for ranks in taking)
                yield Route(part.owner, *cut[turn], tag, mine, node_ranks)


def _chunks(part: BucketPart, size: int) -> list[tuple[int, int]]:
    """Cut a part into chunks: its pieces apart, then the rest, which begins with the header."""
    pieces = [(piece.offset, piece.offset + piece.span.nbytes) for piece in part.apart]
    end = part.start + part.nbytes
    return pieces + [(low, min(low + size, end)) for low in range(part.start, end, size)]


def _entries(plan: SyncPlan, stream: int, owner: int) -> list[tuple[int, ...]]:
    """Return, for each node of the stream, the ranks that take an owner's chunks in turn.

    Owners divide a node's ranks among them, so that each talks to as few as possible.
    """
    owners, by_node = plan.streams[stream].owners, plan.layout.by_node
    place, step = owners.index(owner), len(owners)
    found = []
    for node in plan.streams[stream].nodes:
        ranks = by_node[node]
        turns = [ranks[(place + turn * step) % len(ranks)] for turn in range(len(ranks))]
        found.append(tuple(dict.fromkeys(turns)))
    return found


def partners(plan: SyncPlan, rank: int) -> tuple[int, ...]:
    """Return with whom a rank may exchange chunks, ranks of its own node too."""
    found: set[int] = set()
    for stream, taking in enumerate(plan.streams):
        for owner in taking.owners:
            for ranks in _entries(plan, stream, owner):
                if rank == owner:
                    found.update(ranks)
                elif rank in ranks:
                    found.add(owner)
    if rank >= len(plan.layout.actors):
        found.update(plan.layout.by_node[plan.layout.node(rank)])
    return tuple(sorted(found - {rank}))


@dataclass(frozen=True, slots=True)
class Cost:
    """Hold the bytes of one update, headers left out. Owners, and ranks that take turns, count as equal parts."""

    payload: int  # bytes of the parameters
    sent: dict[int, float]  # rank of the group -> bytes, copies inside the node included
    out: dict[str, float]  # node -> bytes over its network link
    into: dict[str, float]
    inside: dict[str, float]  # node -> bytes between its own ranks

    def seconds(self, network: float, inside: float) -> float:
        """Return the time of the busiest link, at rates in bytes/s in each direction.

        Links work side by side, so the longest counts. Waits of chunks for each other are left out (6 % on links of 400
        Mbit/s).
        """
        crossing = max([*self.out.values(), *self.into.values(), 0])
        return max(crossing / network, max([*self.inside.values(), 0]) / inside)


def cost_of(plan: SyncPlan) -> Cost:
    """Add up `routes` over all of `plan`, without following each chunk."""
    found = Cost(plan.payload, *(defaultdict(float) for _ in range(4)))
    ranks = plan.layout.by_node
    for stream in plan.streams:
        nbytes = plan.payload / len(stream.owners)
        homes: dict[str, float] = defaultdict(float)
        for owner in stream.owners:
            home = plan.layout.actors[owner]
            homes[home] += nbytes
            found.sent[owner] += nbytes * len(stream.nodes)
            found.out[home] += nbytes * (len(stream.nodes) - (home in stream.nodes))
            found.inside[home] += nbytes * (home in stream.nodes)
        for node in stream.nodes:
            siblings = plan.payload * (len(ranks[node]) - 1)
            found.into[node] += plan.payload - homes[node]
            found.inside[node] += siblings
            for rank in ranks[node]:
                found.sent[rank] += siblings / len(ranks[node])
    return found


def transfer_plan(config: Config, ranks: RankMap) -> SyncPlan | None:
    """Plan the transfer of the actor's model over `ranks`; None without engines, or if its shapes are not known."""
    if not has_engines(config):
        return None
    try:
        sent = sent_parameters(config.actor.model_name_or_path, config.lora)
    except ModelError:
        return None
    described = [[name, shape, config.ds.param_dtype] for name, shape in sent]
    nodes = {role: [share.node for share in shares for _ in share.ranks] for role, shares in ranks.roles.items()}
    layout = TransferLayout(tuple(nodes["actor"]), tuple(nodes["rollout"]), config.ds.zero_stage)
    on_gpus = ranks.topology.accelerator == GPU and config.sync.backend in ("auto", "nccl", "ipc")
    return make_plan(described, config.sync.bucket_size_mb(on_gpus) << 20, layout)
