"""Put the right tokens around a text: at its beginning, at the end of an answer, between prompt and answer.

A generating model gets the tokens of the prompt alone, and its answer is what it puts behind them. So an answer to
train on is a list of tokens that, behind those of the prompt, decode to the text of prompt and answer:

1. What follows the prompt's tokens when prompt and answer are tokenized as one text. SentencePiece puts a space before
   a text that stands alone ("4" is `_4`), and none where the text goes on ("2+2=4" ends in `4`).
2. Where the one text has other tokens at the border (a token that holds the end of the prompt and the beginning of the
   answer), no such tokens exist. Then the tokens of the answer alone, if they decode to the text (byte-level BPE).
3. If they do not (SentencePiece: the space), the tokens of the answer after a mark that ends in a token of its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.errors import ModelError
from slurm_rlhf.records import Prompt

ANSWER = "slurm-rlhf-answer"
MARKS = ("\n", "=", ":", "0", "a")
"""Tried in turn: a mark must not merge into one token with the beginning of the answer."""


def encode_prompts(texts: Sequence[str], tokenizer: Tokenizer, templated: bool) -> list[list[int]]:
    """Return the token ids of prompts, which may have an answer behind them.

    They get the tokenizer's own special tokens, as `tokenizer(text)` adds them, but never a second
    beginning-of-sequence token. Texts made by a chat template (`templated`) get those of the template alone.
    """
    if templated:
        return tokenizer.encode_batch(texts, add_special_tokens=False)
    return [
        without_second_bos(ids, text, tokenizer) for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True)
    ]


def without_second_bos(ids: list[int], text: str, tokenizer: Tokenizer) -> list[int]:
    """Remove the beginning-of-sequence token that the tokenizer added to a text which already begins with one.

    Texts that were put into a chat template beforehand begin with it; a model has never seen it twice.
    """
    bos = tokenizer.bos_token_id
    if bos is None or ids[:1] != [bos] or not text.lstrip().startswith(tokenizer.bos_token):
        return ids
    # Where the tokenizer adds none, the first one comes from the text.
    return ids[1:] if ids.count(bos) > text.count(tokenizer.bos_token) else ids


def has_double_bos(ids: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Tell whether a prompt begins with two beginning-of-sequence tokens."""
    bos = tokenizer.bos_token_id
    return bos is not None and list(ids[:2]) == [bos, bos]


def end_tokens(tokenizer: Tokenizer) -> set[int]:
    """List the tokens at which engines end a response: the tokenizer's, and those in generation_config.json.

    Raises ModelError when generation_config.json cannot be read.
    """
    file = tokenizer.directory / "generation_config.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{file}: cannot be read: {error}") from None
    listed = found if isinstance(found, list) else [found]
    return {tokenizer.eos_token_id} | {token for token in listed if isinstance(token, int)}


def missing_eos(tokenizer: Tokenizer) -> str:
    """Say what is wrong with how the chat template ends an answer; "" if nothing is.

    A model that was trained with the template ends its answers as the template does. If no token of `end_tokens` is
    among those, engines go on sampling after the answer, up to rollout.max_new_tokens. Raises ModelError when the
    template refuses a question and its answer.
    """
    if tokenizer.chat_template is None:
        return ""
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
    text = tokenizer.chat_template.render(turns, str(tokenizer.directory), add_generation_prompt=False)
    _, found, behind = text.rpartition(ANSWER)
    if not found:
        return ""  # the template changes the messages: nothing can be concluded
    ends = end_tokens(tokenizer)
    if ends & set(tokenizer.encode(behind, add_special_tokens=False)):
        return ""
    by = f"by {behind.strip()!r}" if behind.strip() else "by nothing"
    names = " or ".join(tokenizer.decode([token], skip_special_tokens=False) for token in sorted(ends))
    return (
        f"the chat template of {tokenizer.directory} ends an answer {by}, and engines end a response at {names} "
        "only: responses may run on to rollout.max_new_tokens. Add the token with which the template ends an answer to "
        "eos_token_id in generation_config.json"
    )


def continuations(
    prompts: Sequence[Prompt], answers: Sequence[str], tokenizer: Tokenizer, templated: bool
) -> list[list[int]]:
    """Return the token ids of each answer behind its prompt; `templated` as in `encode_prompts`."""
    wholes = [prompt.text + answer for prompt, answer in zip(prompts, answers, strict=True)]
    return [
        _behind(prompt.token_ids.tolist(), whole, answer, tokenizer)
        for prompt, whole, answer in zip(prompts, encode_prompts(wholes, tokenizer, templated), answers, strict=True)
    ]


def _behind(prompt: list[int], whole: list[int], answer: str, tokenizer: Tokenizer) -> list[int]:
    if whole[: len(prompt)] == prompt:
        return whole[len(prompt) :]
    text = tokenizer.decode(whole, skip_special_tokens=False)
    alone = tokenizer.encode(answer, add_special_tokens=False)
    for ids in (alone, *_after_marks(answer, tokenizer)):
        if tokenizer.decode(prompt + ids, skip_special_tokens=False) == text:
            return ids
    return alone  # the tokenizer does not decode to what it encoded: nothing better is known


def _after_marks(answer: str, tokenizer: Tokenizer) -> list[list[int]]:
    found = []
    for mark in MARKS:
        before = tokenizer.encode(mark, add_special_tokens=False)
        both = tokenizer.encode(mark + answer, add_special_tokens=False)
        if both[: len(before)] == before:
            found.append(both[len(before) :])
    return found
