"""What a plan costs: bytes per rank and per link, and seconds at given rates. No processes, no torch."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from slurm_rlhf.weight_sync.layout import Stream, distinct
from slurm_rlhf.weight_sync.plan import ITEM_SIZE, SyncPlan

_NETWORK, _INSIDE = 25e9, 100e9


@dataclass(frozen=True, slots=True)
class Account:
    """Bytes of one update, headers left out. Turns that rotate count as shared evenly."""

    payload: int  # of the parameters
    sent: dict[int, float]  # by rank of the group, relays and copies inside the node included
    received: dict[int, float]
    out: dict[str, float]  # by node, over its network link
    into: dict[str, float]
    inside: dict[str, float]  # by node, between its own ranks

    def seconds(self, network: float = _NETWORK, inside: float = _INSIDE) -> float:
        """Of the busiest link, at rates in bytes/s in each direction. Links work side by side, so the longest counts;
        what chunks wait for each other is not in it (6 % on links of 400 Mbit/s)."""
        crossing = max([*self.out.values(), *self.into.values(), 0]) / network
        return max(crossing, max([*self.inside.values(), 0]) / inside)


def account(plan: SyncPlan) -> Account:
    """What `route.routes` adds up to over all of `plan`, without following each chunk."""
    found = Account(plan.payload, *(defaultdict(float) for _ in range(5)))
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
    """Owner -> bytes of the model that it sends."""
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
