"""Which slots of one node each block on it gets: trainers neighbouring and low, engines aligned to their width."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


@lru_cache(maxsize=4096)
def assign_slots(capacity: int, wants: tuple[tuple[int, int], ...]) -> tuple[tuple[int, ...], ...] | None:
    """Slots of a node for each (count, width) of `wants`.

    Width 0: `count` slots, neighbouring where possible. Width w > 0: `count` groups of w neighbouring slots, each
    starting at a multiple of w, so that a group stays within one NVLink pair, quad or NUMA half. None if the groups
    cannot be aligned that way.
    """
    return _groups_above(capacity, wants) or _groups_at_the_top(capacity, wants)


def _by_width(wants: Sequence[tuple[int, int]]) -> list[int]:
    """Indices of the grouped wants, the widest first."""
    return sorted((i for i, (_, width) in enumerate(wants) if width), key=lambda i: (-wants[i][1], i))


def _groups_above(capacity: int, wants: tuple[tuple[int, int], ...]) -> tuple[tuple[int, ...], ...] | None:
    """Ungrouped slots from 0 up, groups right above them."""
    slots: dict[int, tuple[int, ...]] = {}
    cursor = 0
    for index, (count, width) in enumerate(wants):
        if not width:
            slots[index] = tuple(range(cursor, cursor + count))
            cursor += count
    for index in _by_width(wants):
        count, width = wants[index]
        start = -(-cursor // width) * width
        cursor = start + count * width
        slots[index] = tuple(range(start, cursor))
    return tuple(slots[i] for i in range(len(wants))) if cursor <= capacity else None


def _groups_at_the_top(capacity: int, wants: tuple[tuple[int, int], ...]) -> tuple[tuple[int, ...], ...] | None:
    """Groups as high as alignment allows, ungrouped slots in what is left, from 0 up."""
    slots: dict[int, tuple[int, ...]] = {}
    free = set(range(capacity))
    for index in _by_width(wants):
        count, width = wants[index]
        taken: list[range] = []
        for start in range((capacity // width - 1) * width, -1, -width):
            group = range(start, start + width)
            if len(taken) < count and free.issuperset(group):
                taken.append(group)
                free.difference_update(group)
        if len(taken) < count:
            return None
        slots[index] = tuple(slot for group in reversed(taken) for slot in group)
    rest = sorted(free)
    for index, (count, width) in enumerate(wants):
        if not width:
            if len(rest) < count:
                return None
            slots[index], rest = tuple(rest[:count]), rest[count:]
    return tuple(slots[i] for i in range(len(wants)))
