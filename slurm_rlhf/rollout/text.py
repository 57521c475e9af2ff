"""The text of a response."""

from __future__ import annotations

from typing import Any

# Enough to show the decoder that it is not at the start of a text, in every tokenizer of vLLM's own detokenizer.
CONTEXT_TOKENS = 5


def response_text(tokenizer: Any, prompt_ids: list[int], response_ids: list[int], skip_special_tokens: bool) -> str:
    """`response_ids` decoded as what follows the prompt.

    Decoded alone, a response would lose its first space with tokenizers that write it at the start of every word
    (SentencePiece): the text with the prompt's last tokens, minus the text of these.
    """
    context = prompt_ids[-CONTEXT_TOKENS:]
    before, whole = tokenizer.decode(
        [context, context + response_ids],
        skip_special_tokens=skip_special_tokens,
        clean_up_tokenization_spaces=False,
    )
    if whole.startswith(before):
        return str(whole[len(before) :])
    return str(tokenizer.decode(response_ids, skip_special_tokens=skip_special_tokens))
