"""Make examples of conversations: the tokens of a list of messages, and which of them are the assistant's words.

If the chat template has `{% generation %}` marks, they say which, as in transformers. Otherwise a turn is the text that
the template adds after the earlier messages and the header of an answer. A sequence ends with the last assistant token.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from slurm_rlhf.data.tokenizer import Tokenizer, behind_answer, end_tokens
from slurm_rlhf.errors import DataError, ModelError
from slurm_rlhf.records import I32, Bool


class Lesson(NamedTuple):
    """Holds a sequence to train on, cut where its first answer starts."""

    prompt_ids: I32
    response_ids: I32
    action_mask: Bool  # True for each token of the response that the assistant wrote


class Conversation(NamedTuple):
    """Holds messages as text, and where the assistant's words are in it."""

    text: str
    spans: list[tuple[int, int]]


def turn_end(tokenizer: Tokenizer) -> tuple[str, str]:
    """Return the text with which the chat template ends an answer, and the text that it writes after that end.

    The end goes up to the first token at which engines end a response. Without such a token it is all that the template
    writes, except trailing space; empty: it writes no end, or changes the messages. Raises ModelError.
    """
    behind = behind_answer(tokenizer) or ""
    words = filter(None, map(tokenizer.backend.id_to_token, end_tokens(tokenizer)))
    end = min((behind.index(word) + len(word) for word in words if word in behind), default=len(behind.rstrip()))
    return behind[:end], behind[end:]


def converse(
    messages: Sequence[dict[str, Any]],
    first: int,
    tokenizer: Tokenizer,
    tools: Sequence[dict[str, Any]],
    where: str,
    behind: str,
) -> Conversation:
    """Render messages; those of the assistant, from number `first` on, are trained on.

    `behind`: text that the template writes after the end of a turn. Raises ModelError for a template without marks
    that writes a message differently when others follow, DataError where the assistant says nothing.
    """
    template = tokenizer.chat_template
    if template is not None and template.has_marks:
        skipped = len(template.marks(messages[:first], where, tools)) // 2 if first else 0
        text, spans = "", []
        for place, part in enumerate(template.marks(messages, where, tools)):
            if place % 2 and place // 2 >= skipped:
                spans.append((len(text), len(text) + len(part)))
            text += part
    else:
        render = partial(tokenizer.chat, where=where, tools=tools)
        text, spans = render(messages, answer=False), []
        for place, one in enumerate(messages):
            if place < first or one["role"] != "assistant":
                continue
            before, whole = render(messages[:place]), render(messages[: place + 1], answer=False)
            if not (text.startswith(whole) and whole.startswith(before)):
                raise ModelError(
                    f"{where}: the chat template of {tokenizer.directory} writes message {place + 1} in another way "
                    "when others follow, or does not begin it as an answer begins, so that its words cannot be found: "
                    "put {% generation %} and {% endgeneration %} around the assistant's words in a copy's "
                    "chat_template.jinja, or train on the last answer alone"
                )
            spans.append((len(before), len(whole.removesuffix(behind))))
    spans = [(start, end) for start, end in spans if start < end]
    if not spans:
        raise DataError(f"{where}: no words of the assistant are to be trained on: leave the row out")
    return Conversation(text, spans)


def encoded(conversations: Sequence[Conversation], tokenizer: Tokenizer, ends: bool) -> list[Lesson]:
    """Encode conversations; with `ends` each gets an end-of-sequence token.

    A token with at least one character of the assistant's text is trained on, except the first token of the sequence.
    """
    texts = [one.text for one in conversations]
    found = []
    for one, encoding in zip(conversations, tokenizer.encodings(texts, add_special_tokens=False), strict=True):
        starts, stops = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
        mask = np.zeros(len(starts), dtype=np.bool_)
        for start, end in one.spans:
            mask |= (starts < end) & (stops > start)
        mask[:1] = False
        first, last = (np.flatnonzero(mask)[[0, -1]] + [0, 1]).tolist() if mask.any() else (1, len(mask))
        ids = np.array(encoding.ids[:last] + [tokenizer.eos_token_id] * ends, dtype=np.int32)
        words = np.append(mask[first:last], [True] * ends)
        found.append(Lesson(ids[:first], ids[first:], words))
    return found
