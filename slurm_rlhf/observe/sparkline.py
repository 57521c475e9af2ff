"""Draw numbers as characters: a curve as one line of blocks, the parts of a step as a bar."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

_BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Draw the last values as at most `width` blocks from the smallest to the largest; what is no number is a space.

    More values than places: each place has the mean of its share.
    """
    numbers = [value if value is not None and math.isfinite(value) else None for value in values]
    count = min(width, len(numbers))
    shares = [numbers[place * len(numbers) // count : (place + 1) * len(numbers) // count] for place in range(count)]
    means = [_mean([value for value in share if value is not None]) for share in shares]
    known = [mean for mean in means if mean is not None]
    if not known:
        return ""
    low, spread = min(known), max(known) - min(known)
    return "".join(" " if mean is None else _BLOCKS[_level(mean, low, spread)] for mean in means)


def bar(parts: Mapping[str, float], width: int) -> str:
    """Draw positive numbers as runs of their first letter, `width` characters in all: `rrrrrruuuus`.

    Each part gets its share, rounded down, and what is left over goes to those that lost most; none is longer by two.
    """
    total = sum(parts.values())
    if not total > 0:
        return ""
    exact = {name: value / total * width for name, value in parts.items()}
    whole = {name: int(length) for name, length in exact.items()}
    by_loss = sorted(exact, key=lambda name: exact[name] - whole[name], reverse=True)
    for name in by_loss[: width - sum(whole.values())]:
        whole[name] += 1
    return "".join(name[0] * length for name, length in whole.items())


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _level(value: float, low: float, spread: float) -> int:
    return int((value - low) / spread * (len(_BLOCKS) - 1) + 0.5) if spread else len(_BLOCKS) // 2
