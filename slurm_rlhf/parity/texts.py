"""The prompts of a comparison, and how responses to them are sampled."""

from __future__ import annotations

import numpy as np

from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.errors import ModelError
from slurm_rlhf.records import I32

TEMPERATURE = 0.9
NEW_TOKENS = 24
SAMPLES = 2
"""Responses to each prompt: the second one finds the prompt in the prefix cache."""

FEWEST = 16
"""Tokens of the text below."""

TEXT = """A cluster has a queue and every user of it knows two numbers: how long a job may run, and how long it waits.
When 7 people share 8 cards, the arithmetic is simple; with 300 people and 96 nodes it is a matter of policy. So the
scheduler keeps an account: who asked for what, who used how much, and who has waited since Monday. A job that names
its needs well, say 4 nodes for 90 minutes, slips into a gap that a careless one cannot fill. In the evening the gaps
are larger, and a patient program that saves its state, ends when it is told to, and begins again where it was, will
find 2 hours here and 3 hours there, until its work is done. """


def prompts(tokenizer: Tokenizer, max_len: int) -> list[I32]:
    """Cut prompts of different lengths out of a text, from one token to nearly as many as leave room for a response.

    Raises ModelError for a tokenizer that finds next to nothing in a text.
    """
    text = TEXT.replace("\n", " ")
    ids = tokenizer.encode(text)
    if len(ids) < FEWEST:
        raise ModelError(f"its tokenizer makes {len(ids)} tokens of an English text of {len(text)} characters")
    while len(ids) < max_len:
        text += text
        ids = tokenizer.encode(text)
    longest = max_len - NEW_TOKENS
    lengths = sorted({min(length, longest) for length in (1, 5, 17, 33, longest * 5 // 8, longest * 7 // 8)})
    return [np.array(ids[:length], dtype=np.int32) for length in lengths]
