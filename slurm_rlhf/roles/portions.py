"""How much an engine gets at a time, and how much it may hold: pure functions of what is left, all in responses.

An engine that is slow must not sit on prompts that others could have started: when the last prompt is handed out,
every engine should have in hand only what it is working on. So the portions, and the reserve that an engine holds
beyond its width, shrink with what is left. Source: Polychronopoulos and Kuck, Guided Self-Scheduling (1987).
"""

from __future__ import annotations

# An answer brings a portion: the finer, the sooner the news that places are free.
_PORTIONS_PER_WIDTH = 8
# The reserve, a quarter of the width, is a portion that may be finished and not answered, and one on its way.
_RESERVE = 4
# Reserve and portion together are at most a sixth of an engine's share of what is left. So an engine that is up to six
# times slower than its peers has begun everything it holds when they take the last prompt.
_LAST_PORTIONS = 12


def portion(left: int, engines: int, width: int) -> int:
    """What to hand to an engine at once, at least 1.

    left: what no engine has yet; width: responses that an engine works on at once.
    """
    return max(1, min(width // _PORTIONS_PER_WIDTH, left // (_LAST_PORTIONS * engines)))


def allowance(left: int, engines: int, width: int) -> int:
    """What an engine may hold, at least its width: it may also have a reserve."""
    reserve = -(-width // _RESERVE)
    return width + (reserve if engines == 1 else min(reserve, left // (_LAST_PORTIONS * engines)))
