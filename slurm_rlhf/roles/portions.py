"""How many prompts an engine gets at a time, and how many it may hold: pure functions of what is left.

An engine that is slow must not sit on prompts that others could have started: when the last prompt is handed out,
every engine should have in hand only what it is working on. So the portions, and the reserve that an engine holds
beyond its width, shrink with what is left. Source: Polychronopoulos and Kuck, Guided Self-Scheduling (1987).
"""

from __future__ import annotations

# A portion comes back when its last sequence is finished: the finer, the less waits for that.
_PORTIONS_PER_WIDTH = 8
# The reserve keeps an engine busy until its next portion arrives: a quarter of its width.
_RESERVE = 4
# Reserve and portion together are at most a sixth of an engine's share of what is left. So an engine that is up to six
# times slower than its peers has begun everything it holds when they take the last prompt.
_LAST_PORTIONS = 12


def portion(left: int, engines: int, width: int) -> int:
    """Prompts to hand to an engine at once, at least 1.

    left: prompts that no engine has yet; width: prompts whose samples an engine works on at once.
    """
    return max(1, min(width // _PORTIONS_PER_WIDTH, left // (_LAST_PORTIONS * engines)))


def allowance(left: int, engines: int, width: int) -> int:
    """Prompts that an engine may hold, at least as many as its width: it may also have a reserve."""
    reserve = -(-width // _RESERVE)
    return width + (reserve if engines == 1 else min(reserve, left // (_LAST_PORTIONS * engines)))
