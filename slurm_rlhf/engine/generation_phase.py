"""How far a rank has come in sampling, written into its phase, and which ranks are behind the others.

Ranks that sample together wait for each other in every step. When one of them stops, the others' collectives run into
their deadline, and all of them report that; only how far each had come tells who it was.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

GATHERING, SAMPLING, WAITING = "gathering parameters", "sampling", "waiting for the other ranks"

_PLACES = {GATHERING: -1, SAMPLING: 1 << 20, WAITING: 1 << 21}  # a layer's place is its number
_PHASE = re.compile(r"generate: batch (\d+), token (\d+), (?:layer (\d+)|(.+))")


def phase_of(batch: int, token: int, place: int | str) -> str:
    """Write a phase: `place` is the number of a layer, or one of the words above."""
    return f"generate: batch {batch}, token {token}, {f'layer {place}' if isinstance(place, int) else place}"


def behind(phases: Mapping[int, str]) -> list[int]:
    """List the ranks that have come less far than another; `phases`: rank -> its phase. Empty: nobody is behind.

    A rank in another phase than these has not begun.
    """
    reached = {rank: _reached(phase) for rank, phase in phases.items()}
    furthest = max(reached.values(), default=(0, 0, 0))
    least = min(reached.values(), default=furthest)
    return sorted(rank for rank, place in reached.items() if place == least != furthest)


def _reached(phase: str) -> tuple[int, int, int]:
    match = _PHASE.fullmatch(phase)
    if match is None:
        return (0, 0, 0)
    batch, token, layer, word = match.groups()
    return int(batch), int(token), int(layer) if layer else _PLACES.get(word, 0)
