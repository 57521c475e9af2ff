"""Who sends how much of a stream, and how often: from the rates of the links. Pure data, without torch.

Where every owner holds the whole model, shares follow the rates. Where each holds a shard, shares are given, and a slow
link sends each byte once while nodes of the engines relay it. With equal links nothing of this shows: equal shares, and
as many copies from each owner's node as there are such nodes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FEW_NODES = 8
"""Up to so many engine nodes talk to all others; with more, each has a bounded number of partners."""
_MOST_COPIES = 4  # that leave an owner's node where there are more engine nodes than that
GIGABIT = 125_000_000
"""Bytes."""
_WEIGHTS = 1024  # what the weights of a stream's owners add up to, about
_SLACK = 1.15  # a copy more from the owners may cost so much: relays have a price, too
_SPARE_STARTS = 2  # how often each node is a first head, about: so relaying is shared evenly


@dataclass(frozen=True, slots=True)
class Link:
    """Name the interface of a node that an owner's bytes leave on."""

    node: str
    interface: str


@dataclass(frozen=True, slots=True)
class Duty:
    """Say what one owner does for a stream."""

    weight: int  # its part of the bytes is this over the sum of all owners' weights
    copies: int  # how often each of its bytes leaves its node, towards other nodes
    first: int  # index among the other nodes at which its turns begin
    starts: int  # how many nodes it takes turns with as the first that gets a chunk
    seat: int  # index of the rank in each node that gets its chunks; -1: they take turns


def duties(
    links: Sequence[Link], others: Sequence[int], seats: Sequence[int], rates: Sequence[float], cut: bool
) -> tuple[Duty, ...]:
    """Return the duty of each owner.

    `links`: of each owner; `others`: how many other nodes it serves; `seats`: how many ranks of a node take turns with
    its chunks, 0 where nodes differ; `rates`: bytes/s at which it can send, empty or with a 0 in it: equal, as not all
    are known; `cut`: each owner holds a shard.
    """
    known = bool(rates) and all(rate > 0 for rate in rates)
    weights = [1] * len(links)
    if known and not cut:
        weights = [max(round(_WEIGHTS * rate / sum(rates)), 1) for rate in rates]
    most = _most_copies(links, others)
    copies = most if not known else _copies(links, weights, most, rates)
    total, before = sum(weights), 0
    found = []
    for owner, weight in enumerate(weights):
        nodes, share = others[owner], weight / total
        starts = max(nodes, 1)
        if nodes > FEW_NODES:
            starts = min(math.ceil(_SPARE_STARTS * nodes * share / copies[owner]), nodes)
        place, beside = _place(links, owner)
        fixed = seats[owner] > 0 and beside % seats[owner] == 0 and len(set(weights)) == 1
        first = before * nodes // total
        found.append(Duty(weight, copies[owner], first, starts, place % seats[owner] if fixed else -1))
        before += weight
    return tuple(found)


def seconds(links: Sequence[Link], given: Sequence[Duty], rates: Sequence[float]) -> float:
    """Return the time of the slowest link per byte of the model, at these rates in bytes/s.

    Engine nodes count as being linked as fast as the fastest node of the owners.
    """
    total = sum(duty.weight for duty in given)
    load, rate = _by_link(links, [duty.weight * duty.copies / total for duty in given]), _by_link(links, rates)
    return max(*(load[link] / rate[link] for link in load), 1 / _fastest_node(links, rates))


def _most_copies(links: Sequence[Link], others: Sequence[int]) -> list[int]:
    """No node of the owners sends more than a copy of the model, if all of them send as much."""
    nodes = len({link.node for link in links})
    return [min(nodes, count if count <= FEW_NODES else _MOST_COPIES) for count in others]


def _copies(links: Sequence[Link], weights: Sequence[int], most: Sequence[int], rates: Sequence[float]) -> list[int]:
    """As many as leave no link busy for much longer than the network needs in any case."""
    total = sum(weights)
    share, rate = _by_link(links, [weight / total for weight in weights]), _by_link(links, rates)
    least = max(*(share[link] / rate[link] for link in share), 1 / _fastest_node(links, rates))
    affordable = {link: int(_SLACK * least * rate[link] / share[link]) for link in share}
    return [min(max(affordable[link], 1), limit) for link, limit in zip(links, most, strict=True)]


def _by_link(links: Sequence[Link], values: Sequence[float]) -> Mapping[Link, float]:
    found: dict[Link, float] = defaultdict(float)
    for link, value in zip(links, values, strict=True):
        found[link] += value
    return found


def _fastest_node(links: Sequence[Link], rates: Sequence[float]) -> float:
    found: dict[str, float] = defaultdict(float)
    for link, rate in zip(links, rates, strict=True):
        found[link.node] += rate
    return max(found.values())


def _place(links: Sequence[Link], owner: int) -> tuple[int, int]:
    """Return where an owner stands among those with its interface, and how many they are."""
    same = [index for index, link in enumerate(links) if link.interface == links[owner].interface]
    return same.index(owner), len(same)


def planned_rates(actors: Sequence[str], gbits: float, of_nodes: Mapping[str, float]) -> tuple[float, ...]:
    """Return the bytes/s of each actor rank; its node's ranks share the links. Empty where all nodes are alike.

    `actors`: node of each rank; `gbits`: of a node's links, in Gbit/s; `of_nodes`: of those that have others.
    """
    if not of_nodes:
        return ()
    return tuple(of_nodes.get(node, gbits) * GIGABIT / actors.count(node) for node in actors)


def parents(nodes: int, copies: int) -> tuple[int, ...]:
    """Return from which of the nodes before it each gets a chunk, -1: from the owner.

    They are cut into as many arcs as there are copies, and the first of each arc is its head. In a short arc the head
    serves all. In a longer one everybody hands on over three distances, the same for all chunks: so a node has few
    partners, however many nodes there are, and a chunk few stations, about three times the cube root of the nodes.
    """
    found: list[int] = []
    longest = -(-nodes // copies) if copies else 0
    step = 2
    while step**3 < longest:
        step += 1
    for arc in range(copies):
        low, high = arc * nodes // copies, (arc + 1) * nodes // copies
        for at in range(high - low):
            if at == 0:
                found.append(-1)
            elif longest <= FEW_NODES:
                found.append(low)
            else:
                distance = 1 if at % step else step if at % step**2 else step**2
                found.append(low + at - distance)
    return tuple(found)
