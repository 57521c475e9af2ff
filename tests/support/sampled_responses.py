"""Responses as engines answer them, of one token unless a test says otherwise, and the items of reward functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from slurm_rlhf.records import I32, STOP, Prompt, Trajectory, VersionSpan
from slurm_rlhf.rewards.items import Item, items_of

IDS = np.ones(1, np.int32)


def response(
    prompt: int,
    text: str = "",
    sample: int = 0,
    tokens: int = 1,
    prompt_ids: I32 = IDS,
    finish_reason: str = STOP,
    versions: Sequence[VersionSpan] = (),
    **rest: Any,
) -> Trajectory:
    ids, floats, mask = np.arange(tokens, dtype=np.int32), np.zeros(tokens, np.float32), np.ones(tokens, np.bool_)
    return Trajectory(prompt, sample, prompt_ids, ids, floats, mask, finish_reason, text, list(versions), **rest)


def sampled(texts: Sequence[str], each: int = 1, label: Any = None) -> tuple[list[Prompt], list[Trajectory]]:
    """Prompts p0, p1 and so on, `each` times, and a response to every one."""
    prompts = [Prompt(n, f"p{n}", IDS, label, {"input": f"p{n}"}) for n in range(len(texts) // each)]
    owners = [prompt for prompt in prompts for _ in range(each)]
    return owners, [response(owner.index, text) for owner, text in zip(owners, texts, strict=True)]


def item(text: str, label: Any = None, tokens: int = 1, row: dict[str, Any] | None = None) -> Item:
    return items_of([Prompt(0, "p", IDS, label, row or {})], [response(0, text, tokens=tokens)])[0]
