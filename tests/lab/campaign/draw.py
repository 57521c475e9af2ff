"""Draw faults from a seed: as many kinds, targets and phases as the number allows, in an order that the seed gives."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Sequence

from campaign.faults import NEEDS, Fault


def runnable(faults: Sequence[Fault], has: Collection[str]) -> tuple[list[Fault], list[Fault]]:
    """Part the faults into those that a machine which `has` words of `NEEDS` can run, and the others."""
    unknown = {fault.needs for fault in faults} - {"", *NEEDS}
    if unknown:
        raise ValueError(f"no such need: {sorted(unknown)}")
    return [one for one in faults if not one.needs or one.needs in has], [
        one for one in faults if one.needs and one.needs not in has
    ]


def draw(faults: Sequence[Fault], count: int, seed: int) -> list[Fault]:
    """Choose `count` different faults; fewer where there are no more.

    Each one drawn has the most of kind, target and phase that were not drawn yet, and then those that were drawn least:
    a small number covers them all before a second of the same kind comes.
    """
    dice = random.Random(seed)
    left = list(faults)
    drawn: list[Fault] = []
    dice.shuffle(left)
    seen: Counter[tuple[str, str]] = Counter()

    def known(fault: Fault) -> tuple[int, int]:
        counts = [seen[part] for part in _parts(fault)]
        return sum(count > 0 for count in counts), sum(counts)

    while left and len(drawn) < count:
        best = min(left, key=known)
        left.remove(best)
        drawn.append(best)
        seen.update(_parts(best))
    return drawn


def _parts(fault: Fault) -> list[tuple[str, str]]:
    return [("kind", fault.kind), ("target", fault.target), ("phase", fault.phase)]


def delay_s(fault: Fault, seed: int, longest_s: float) -> float:
    """Draw how long after the beginning of its phase a fault strikes."""
    return random.Random(f"{seed} {fault.name}").uniform(0.0, longest_s)
