"""Draw faults from a seed: as many kinds, targets and phases as the number allows, in an order that the seed gives."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from campaign.faults import Fault
from campaign.files import can_mount


def runnable(faults: Sequence[Fault]) -> list[Fault]:
    """Choose the faults that this machine can run."""
    here = {"", "root"} if can_mount() else {""}
    return [fault for fault in faults if fault.needs in here]


def draw(faults: Sequence[Fault], count: int, seed: int) -> list[Fault]:
    """Choose `count` different faults; fewer where there are no more.

    Each one drawn has the most of kind, target and phase that were not drawn yet, and then those that were drawn least:
    a small number covers them all before a second of the same kind comes.
    """
    left, drawn, seen = list(faults), list[Fault](), Counter[tuple[str, str]]()
    random.Random(seed).shuffle(left)

    def parts(fault: Fault) -> list[tuple[str, str]]:
        return [("kind", fault.kind), ("target", fault.target), ("phase", fault.phase)]

    def known(fault: Fault) -> tuple[int, int]:
        counts = [seen[part] for part in parts(fault)]
        return sum(count > 0 for count in counts), sum(counts)

    while left and len(drawn) < count:
        drawn.append(min(left, key=known))
        left.remove(drawn[-1])
        seen.update(parts(drawn[-1]))
    return drawn


def delay_s(fault: Fault, seed: int, longest_s: float) -> float:
    """Draw how long after the beginning of its phase a fault strikes."""
    return random.Random(f"{seed} {fault.name}").uniform(0.0, longest_s)
