"""How a model reads a micro-batch, and what its sequences cost. Imports no numpy: the planner does without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """Say how a model reads a micro-batch, and what its sequences cost."""

    packed: bool = False  # end to end in one row; otherwise each has a row, padded to the longest
    attention: float = 0.0  # cost of attention for a pair of tokens; unit: the cost of all else for one token
    ranks: int = 1  # neighbouring ranks that compute a micro-batch together, a part of its tokens each

    def cost(self, length: int) -> float:
        """Return the cost of a sequence; unit: one token without attention."""
        return length * (1.0 + self.attention * length)

    def size(self, lengths: Sequence[int]) -> int:
        """Count the tokens of a micro-batch of sequences of these lengths."""
        return sum(lengths) if self.packed else max(lengths) * len(lengths)


ROWS = Layout()
"""Layout with one row per sequence, whose cost is its number of tokens."""
