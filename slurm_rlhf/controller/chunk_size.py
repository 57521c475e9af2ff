"""How much an engine gets at a time, how much it may hold, how much it answers with: pure functions, all in responses.

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


# An answer has a part of a message that is bounded, `codec.MAX_HEADER_BYTES`: this is an eighth of it.
_ANSWER_BYTES = 8 << 20
_ANSWER_RESPONSES = 8192  # of four arrays each, which may be frames of their own: as many as a message may have, halved
_TOKEN_BYTES = 17  # its number, log-prob and mask, and eight bytes of text: twice what a token usually stands for
_RESPONSE_BYTES = 256  # beside its tokens


def answers(responses: int, prompt_tokens: int, response_tokens: int) -> list[int]:
    """How many responses each answer brings, all together `responses`, so that every answer fits into a message.

    prompt_tokens and response_tokens: of the longest, at most.
    """
    size = _RESPONSE_BYTES + 4 * prompt_tokens + _TOKEN_BYTES * response_tokens
    most = max(1, min(_ANSWER_RESPONSES, _ANSWER_BYTES // size))
    return [min(most, responses - begun) for begun in range(0, responses, most)]
