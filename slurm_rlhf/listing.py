"""Long lists in messages: the first few items, and how many more there are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def shortened(items: Iterable[str], most: int = 5, separator: str = ", ") -> str:
    """Join the first `most` items and count the others: "a, b and 5 more"."""
    listed = list(items)
    rest = len(listed) - most
    return separator.join(listed[:most]) + (f" and {rest} more" if rest > 0 else "")


def shortened_lines(lines: Sequence[str], most: int) -> str:
    """Put the first `most` items and the count of the others on indented lines of their own, below a message."""
    rest = len(lines) - most
    return "".join(f"\n  {line}" for line in [*lines[:most], *([f"and {rest} more"] if rest > 0 else [])])
