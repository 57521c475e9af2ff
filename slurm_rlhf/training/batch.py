"""Packed experience as right-padded tensors, and forward passes over it without gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slurm_rlhf.records import F32, Experience
from slurm_rlhf.training.shared_prompts import Layout, attention_mask, plain, tokens_read


@dataclass(slots=True)
class TokenBatch:
    """Rows of at most L tokens for A response tokens, in the order of the experience.

    Right-padded, and the models are causal: real tokens see no padding, so where a row is a sequence there is no
    attention mask, and position ids are 0 .. L-1.
    """

    input_ids: Tensor  # int64 [B, L], 0 where padded
    action_index: Tensor  # int64 [A] into [B * L]: the token before each response token, whose hidden state predicts it
    targets: Tensor  # int64 [A], the response tokens
    position_ids: Tensor | None = None  # int64 [B, L], where a row has several texts
    attention_mask: Tensor | None = None  # bool [B, 1, L, L], there too

    @property
    def rows(self) -> dict[str, Tensor]:
        """Return what the body of a model needs to know of rows that are more than a sequence."""
        given = {"position_ids": self.position_ids, "attention_mask": self.attention_mask}
        return {name: tensor for name, tensor in given.items() if tensor is not None}


def collate(exp: Experience, device: torch.device, layout: Layout | None = None, *, whole: bool = False) -> TokenBatch:
    """Pad all sequences of `exp` into one batch, by `layout` or in a row each.

    The last token of a response is in `targets` alone, but with `whole`, which is for rows of their own.
    Raises ValueError for a response without a prompt before it.
    """
    if np.any((exp.prompt_lens == 0) & (exp.response_lens > 0)):
        index = int(np.flatnonzero((exp.prompt_lens == 0) & (exp.response_lens > 0))[0])
        raise ValueError(f"sequence {index} has a response but no prompt: nothing predicts its first token")
    placed = layout or plain(exp, whole)
    width = placed.width
    sequence = np.repeat(np.arange(len(exp)), exp.lengths)
    row, prompt = placed.row[sequence], exp.prompt_lens[sequence]
    position = np.arange(len(sequence)) - exp.token_offsets[sequence]
    is_action = position >= prompt
    column = position + np.where(is_action, placed.start[sequence] - prompt, placed.prompt[sequence])
    input_ids = np.zeros((len(placed.rows), width), dtype=np.int64)
    read = np.ones_like(is_action) if whole else position < (exp.prompt_lens + tokens_read(exp))[sequence]
    input_ids[row[read], column[read]] = exp.token_ids[read]
    # The first token of a response follows its prompt.
    before = np.where(position == prompt, placed.prompt[sequence] + prompt, column) - 1
    action_index = (row * width + before)[is_action]
    targets = exp.token_ids[is_action].astype(np.int64)
    batch = TokenBatch(*(to_device(values, device) for values in (input_ids, action_index, targets)))
    if layout is not None:
        positions = np.zeros_like(input_ids)
        positions[row[read], column[read]] = position[read]
        batch.position_ids = to_device(positions, device)
        batch.attention_mask = to_device(attention_mask(exp, layout), device)
    return batch


def to_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """Copy `values` to `device`, without waiting for a GPU's queued work, as a copy from pageable memory would."""
    if device.type == "cuda":
        return torch.from_numpy(values).pin_memory().to(device, non_blocking=True)
    return torch.tensor(values, device=device)


def column(exp: Experience, name: str, device: torch.device) -> Tensor:
    """Return a column of the experience, fp32 [A]. Raises KeyError naming those that are there."""
    if name not in exp.columns:
        raise KeyError(f"the experience has no column {name!r}; it has {', '.join(sorted(exp.columns)) or 'none'}")
    return to_device(exp.columns[name].astype(np.float32), device)


def optional_column(exp: Experience, name: str, device: torch.device) -> Tensor | None:
    """Return a column of the experience, fp32 [A]; None where it has no such column."""
    return column(exp, name, device) if name in exp.columns else None


def per_action(
    exp: Experience,
    micro: list[list[int]],
    device: torch.device,
    answer: Callable[[TokenBatch], Tensor],
    place: Callable[[Experience], Layout | None] = lambda part: None,
) -> F32:
    """Call `answer` on every micro-batch and return its numbers, one for each action, in the order of `exp`, [A].

    `place` chooses the rows of a micro-batch, as in `collate`.
    `micro`: rows of `exp`; every row must be in exactly one. Under ZeRO-3 each is a collective, so that every rank
    needs as many.
    """
    with torch.no_grad():
        parts = [exp.select(rows) for rows in micro]
        return in_order(exp, micro, [answer(collate(part, device, place(part))) for part in parts])


def in_order(exp: Experience, micro: list[list[int]], answers: list[Tensor]) -> F32:
    """Put the numbers of all micro-batches, one for each action, in the order of `exp`, [A]."""
    offsets = exp.action_offsets
    result = np.full(int(offsets[-1]), np.nan, dtype=np.float32)
    # Once, after the last: waiting for each micro-batch would give the next one to an idle device.
    values = torch.cat(answers).cpu().numpy() if answers else result[:0]
    start = 0
    for row in (row for rows in micro for row in rows):
        end = start + int(exp.response_lens[row])
        result[offsets[row] : offsets[row + 1]] = values[start:end]
        start = end
    return result
