"""Put blocks of slots on nodes, and choose the slots of each block there: a small bin packing.

Nodes that look alike (same free slots, same blocks on them) are handled as one bucket, so that an attempt costs little
on 10,000 nodes. Attempts go from the most to the least symmetric layout; the first that fits is taken. With three or
more sizes of nodes, all attempts may fail although a layout exists. On a node trainers get neighbouring low slots, and
engines slots that are aligned to their width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations

Assignment = list[tuple[int, int]]
"""(node index, slots there) in node order."""


@dataclass(frozen=True, slots=True)
class Block:
    """Describe what `roles` ask for: one role, or several that share their slots.

    `per_node` slots on each of `num_nodes` nodes. Where `per_node` is 0: `engines` groups of `tp` slots, spread evenly
    over `num_nodes` nodes, or over as few as hold them where that is 0 too. `tp` is 0 where no engine is among `roles`.
    """

    roles: tuple[str, ...]
    num_nodes: int
    per_node: int
    tp: int = 0
    engines: int = 0

    @property
    def slots(self) -> int:
        """Count the slots on all nodes together."""
        return self.num_nodes * self.per_node or self.engines * self.tp

    @property
    def widest(self) -> int:
        """Count the slots that at least one node must have free."""
        return self.per_node or self.tp * (-(-self.engines // self.num_nodes) if self.num_nodes else 1)


@dataclass(frozen=True, slots=True)
class _Policy:
    share: bool  # prefer nodes that already hold something to untouched ones
    mixed: bool  # a block may take nodes that do not look alike
    loose: bool = False  # take the nodes with the most free slots, not those where a block fits tightly


_POLICIES = [
    _Policy(share, mixed, loose)
    for mixed, loose in ((False, False), (True, False), (True, True))
    for share in (False, True)
]
_Bucket = tuple[tuple[int, ...], int]  # blocks on the node, free slots
_Choice = list[tuple[_Bucket, int, list[int]]]  # (bucket, slots on each node, node indices)
_Buckets = dict[_Bucket, list[int]]  # node indices in rising order; never changed in place


class _Space:
    """Keep the free slots of all nodes while blocks are placed."""

    def __init__(self, buckets: _Buckets) -> None:
        self.buckets = dict(buckets)

    def take(self, number: int, choice: _Choice) -> None:
        """Place block `number` on the nodes of `choice`."""
        for bucket, slots, nodes in choice:
            here, gone = self.buckets.pop(bucket), set(nodes)
            if left := [node for node in here if node not in gone]:
                self.buckets[bucket] = left
            after = ((*bucket[0], number), bucket[1] - slots)
            self.buckets[after] = sorted(self.buckets.get(after, []) + nodes)

    def _ranked(self, least: int, policy: _Policy) -> list[tuple[_Bucket, list[int]]]:
        """List the buckets with at least `least` free slots, in the order of the policy."""
        fitting = [item for item in self.buckets.items() if item[0][1] >= least]
        own, tight = (-1 if policy.share else 1), (-1 if policy.loose else 1)
        return sorted(fitting, key=lambda item: (own * len(item[0][0]), tight * item[0][1], item[1][0]))

    def choose(self, block: Block, policy: _Policy) -> _Choice | None:
        """Choose where a block goes; None: it does not fit."""
        if not block.per_node:
            return self._choose_engines(block, policy)
        choice: _Choice = []
        missing = block.num_nodes
        for bucket, nodes in self._ranked(block.per_node, policy):
            if len(nodes) < block.num_nodes and not policy.mixed:
                continue
            choice.append((bucket, block.per_node, nodes[:missing]))
            missing -= len(choice[-1][2])
            if not missing:
                return choice
        return None

    def _choose_engines(self, block: Block, policy: _Policy) -> _Choice | None:
        ranked = self._ranked(block.tp, policy)
        most = block.engines  # engines on one node
        if block.num_nodes:
            most = -(-block.engines // block.num_nodes)
            if not policy.mixed:
                ranked = [item for item in ranked if item[0][1] >= most * block.tp and len(item[1]) >= block.num_nodes]
        ranked.sort(key=lambda item: -min(item[0][1] // block.tp, most))
        taken: list[tuple[_Bucket, list[int]]] = []
        count = room = 0
        for bucket, nodes in ranked:
            each = bucket[1] // block.tp
            enough = block.num_nodes - count if block.num_nodes else -(-(block.engines - room) // each)
            if enough <= 0:
                break
            taken.append((bucket, nodes[:enough]))
            count += len(taken[-1][1])
            room += len(taken[-1][1]) * each
        if room < block.engines or not block.num_nodes <= count <= block.engines:
            return None
        return _spread(block, taken)


def _spread(block: Block, taken: list[tuple[_Bucket, list[int]]]) -> _Choice:
    """Spread the engines of `block` over the nodes `taken`, as evenly as possible, extras on the first nodes."""
    room = {node: bucket[1] // block.tp for bucket, nodes in taken for node in nodes}
    levels = [[min(each, level) for each in room.values()] for level in range(max(room.values()) + 1)]
    level = max(number for number, engines in enumerate(levels) if sum(engines) <= block.engines)
    engines = dict(zip(room, levels[level], strict=True))
    for node in sorted(node for node in room if room[node] > level)[: block.engines - sum(levels[level])]:
        engines[node] += 1
    return [
        (bucket, count * block.tp, [node for node in nodes if engines[node] == count])
        for bucket, nodes in taken
        for count in sorted({engines[node] for node in nodes})
    ]


def _orders(blocks: Sequence[Block], thorough: bool) -> Iterator[tuple[int, ...]]:
    """List orders in which to place blocks: first two that begin with the widest, then, if `thorough`, all others.

    In the very first order, engines that may go on any node come last, to fill the slots that the others leave.
    """

    widest = tuple(sorted(range(len(blocks)), key=lambda n: (-blocks[n].widest, -blocks[n].slots, n)))
    engines_last = tuple(sorted(widest, key=lambda number: not blocks[number].num_nodes))
    rest = permutations(widest) if thorough else ()
    return iter(dict.fromkeys((engines_last, widest, *rest)))


def pack(capacities: Sequence[int], blocks: Sequence[Block], *, thorough: bool = True) -> list[Assignment] | None:
    """Put each of `blocks` on nodes with `capacities` slots; None if they do not fit. Deterministic.

    `thorough=False` tries only the most promising orders of blocks.
    """
    if sum(block.slots for block in blocks) > sum(capacities):
        return None
    largest = max(capacities, default=0)
    if any(max(block.per_node, block.tp) > largest or block.num_nodes > len(capacities) for block in blocks):
        return None
    buckets: _Buckets = {}
    for index, capacity in enumerate(capacities):
        buckets.setdefault(((), capacity), []).append(index)
    for policy in _POLICIES:
        for order in _orders(blocks, thorough):
            if (placed := _try(_Space(buckets), blocks, order, policy)) is not None:
                choices = [placed[number] for number in range(len(blocks))]
                return [sorted((node, slots) for _, slots, nodes in each for node in nodes) for each in choices]
    return None


def _try(space: _Space, blocks: Sequence[Block], order: tuple[int, ...], policy: _Policy) -> dict[int, _Choice] | None:
    placed: dict[int, _Choice] = {}
    for number in order:
        if (choice := space.choose(blocks[number], policy)) is None:
            return None
        space.take(number, choice)
        placed[number] = choice
    return placed


@lru_cache(maxsize=4096)
def assign_slots(capacity: int, wants: tuple[tuple[int, int], ...]) -> tuple[tuple[int, ...], ...] | None:
    """Choose slots of a node for each (count, width) of `wants`.

    Width 0: `count` slots, the lowest. Width w > 0: `count` groups of w neighbouring slots, each starting at a multiple
    of w, so that a group stays within one NVLink pair, quad or NUMA half: right above the slots of trainers, else as
    high as possible. None if they do not fit in this way.
    """
    for above in (True, False):
        slots: dict[int, tuple[int, ...]] = {}
        free = set(range(capacity))
        for index in sorted(range(len(wants)), key=lambda index: (above and wants[index][1] > 0, -wants[index][1])):
            count, width = wants[index]
            starts = range(0, capacity - width + 1, width) if width else range(0)
            ranges = (range(start, start + width) for start in (starts if above else reversed(starts)))
            groups = [group for group in ranges if free.issuperset(group)][:count]
            taken = sorted(slot for group in groups for slot in group) if width else sorted(free)[:count]
            slots[index] = tuple(taken)
            free.difference_update(taken)
        if all(len(slots[index]) == count * max(width, 1) for index, (count, width) in enumerate(wants)):
            return tuple(slots[index] for index in range(len(wants)))
    return None
