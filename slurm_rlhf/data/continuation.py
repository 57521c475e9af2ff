"""Answers as the tokens that follow a prompt's, which need not be those of the answer alone.

A generating model gets the prompt's tokens, those of the prompt alone, and its answer is what it puts behind them. So
an answer to train on is tokens that, behind those of the prompt, spell the text of prompt and answer:

1. What follows the prompt's tokens when prompt and answer are tokenized as one text. SentencePiece puts a space before
   a text that stands alone ("4" is `_4`), and none where the text goes on ("2+2=4" ends in `4`).
2. Where the one text has other tokens at the seam (a token that holds the end of the prompt and the begin of the
   answer), no such tokens exist. Then the tokens of the answer alone, if they spell the text (byte-level BPE).
3. If they do not (SentencePiece: the space), the tokens of the answer behind a mark that ends in a token of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from slurm_rlhf.data.prompts import encode_prompts
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.records import Prompt

MARKS = ("\n", "=", ":", "0", "a")
"""Tried in turn: a mark must not melt into one token with the answer's begin."""


def continuations(
    prompts: Sequence[Prompt], answers: Sequence[str], tokenizer: Tokenizer, templated: bool
) -> list[list[int]]:
    """Token ids of each answer behind its prompt; `templated` as of `encode_prompts`."""
    wholes = [prompt.text + answer for prompt, answer in zip(prompts, answers, strict=True)]
    return [
        _behind(prompt.token_ids.tolist(), whole, answer, tokenizer)
        for prompt, whole, answer in zip(prompts, encode_prompts(wholes, tokenizer, templated), answers, strict=True)
    ]


def _behind(prompt: list[int], whole: list[int], answer: str, tokenizer: Tokenizer) -> list[int]:
    if whole[: len(prompt)] == prompt:
        return whole[len(prompt) :]
    spelled = tokenizer.decode(whole, skip_special_tokens=False)
    alone = tokenizer.encode(answer, add_special_tokens=False)
    for ids in (alone, *_marked(answer, tokenizer)):
        if tokenizer.decode(prompt + ids, skip_special_tokens=False) == spelled:
            return ids
    return alone  # the tokenizer does not give back what it was given: nothing better is known


def _marked(answer: str, tokenizer: Tokenizer) -> list[list[int]]:
    found = []
    for mark in MARKS:
        before = tokenizer.encode(mark, add_special_tokens=False)
        both = tokenizer.encode(mark + answer, add_special_tokens=False)
        if both[: len(before)] == before:
            found.append(both[len(before) :])
    return found
