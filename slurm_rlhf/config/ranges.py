"""Define ranges of numbers, as the schema writes them in the types of its keys: `Annotated[int, COUNT]`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True, slots=True)
class Range:
    """Hold low <= value <= high; `above` and `below` exclude the ends."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    below: bool = False

    def __contains__(self, value: float) -> bool:
        low = self.low < value if self.above else self.low <= value
        return low and (value < self.high if self.below else value <= self.high)

    def __str__(self) -> str:
        low = "" if self.low == -math.inf else f"{'above' if self.above else 'at least'} {self.low:.12g}"
        high = "" if self.high == math.inf else f"{'below' if self.below else 'at most'} {self.high:.12g}"
        return " and ".join(part for part in (low, high) if part)


ANY = Range()
COUNT = Range(1)
NOT_NEGATIVE = Range(0)
POSITIVE = Range(0, above=True)
SHARE = Range(0, 1)

FilePath = Annotated[str, "path"]
"""A file or directory: made absolute when it is read. Empty stays empty."""
URLS = ("http://", "https://")
"""Beginnings of the addresses of servers, which some keys take in place of a file."""
