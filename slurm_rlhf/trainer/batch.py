"""Experience as tensors: packed into one row, or a padded row for each sequence; forward passes without gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slurm_rlhf.records import F32, Experience
from slurm_rlhf.trainer.ulysses import SequenceGroup


@dataclass(slots=True)
class PackedRow:
    """Describe a row of T tokens in which N sequences lie end to end."""

    position_ids: Tensor  # int64 [1, T], from 0 on in each sequence; with a group of this rank's tokens
    bounds: Tensor  # int32 [N + 1], where the sequences begin, and T
    lengths: tuple[int, ...]  # [N], the same for the host
    group: SequenceGroup | None = None  # ranks that compute the row together


@dataclass(slots=True)
class TokenBatch:
    """Sequences for A response tokens, in the order of the experience: one packed row, or a row of L tokens each.

    Rows of their own are right-padded, and the models are causal: real tokens see no padding, so there is no attention
    mask, and position ids are 0 .. L-1. Ranks that compute a row together have a batch each, of their own tokens.
    """

    input_ids: Tensor  # int64 [B, L], 0 where padded; [1, T] if packed
    action_index: Tensor  # int64 [A] into [B * L]: the token before each response token, whose hidden state predicts it
    targets: Tensor  # int64 [A], the response tokens
    row: PackedRow | None  # None: every sequence has a row
    first: int = 0  # place of this rank's first action among those of all ranks that compute the row
    actions: int = 0  # actions of all ranks that compute the row

    def whole(self, values: Tensor) -> Tensor:
        """Return the numbers of all actions, given those that this rank has computed, [A]. Collective with a group."""
        group = self.row.group if self.row else None
        return group.whole(values, self.first, self.actions) if group else values


def collate(
    exp: Experience,
    device: torch.device,
    *,
    packed: bool = False,
    group: SequenceGroup | None = None,
    read: NDArray[np.int64] | None = None,
) -> TokenBatch:
    """Lay all sequences of `exp` into one row (`packed`), or pad each to the longest.

    The last token of a response predicts nothing: it is in `targets` alone. With `read`, [N], all tokens are in the
    rows, and the actions are one token of each sequence, by its place from 0 on. `group`: ranks that compute the row
    together; then there may be a few tokens of padding behind its sequences.
    Raises ValueError for a response without a prompt before it.
    """
    if np.any((exp.prompt_lens == 0) & (exp.response_lens > 0)):
        index = int(np.flatnonzero((exp.prompt_lens == 0) & (exp.response_lens > 0))[0])
        raise ValueError(f"sequence {index} has a response but no prompt: nothing predicts its first token")
    responses = exp.response_lens.astype(np.int64)
    lengths = exp.prompt_lens + (np.maximum(responses - 1, 0) if read is None else responses)  # read by the model
    filled = -int(lengths.sum()) % group.size if group else 0
    width = int(lengths.sum()) + filled if packed else int(lengths.max(initial=1))
    starts = np.array(np.cumsum(lengths) - lengths if packed else np.arange(len(exp)) * width, dtype=np.int64)
    row = np.repeat(np.arange(len(exp)), exp.lengths)
    position = np.arange(len(row)) - exp.token_offsets[row]
    input_ids = np.zeros((1 if packed else len(exp), width), dtype=np.int64)
    known = position < lengths[row]
    input_ids.reshape(-1)[(starts[row] + position)[known]] = exp.token_ids[known]
    is_action = position >= exp.prompt_lens[row]
    at = np.asarray((starts[row] + position - 1)[is_action] if read is None else starts + read)
    targets = exp.token_ids[is_action if read is None else slice(0)].astype(np.int64)
    described, first, actions = None, 0, len(at)
    if packed:
        places = np.append(position[known], np.arange(filled))
        sizes = lengths.tolist() + [filled] * (filled > 0)
        if group:
            mine = group.tokens(width)
            first, last = np.searchsorted(at, [mine.start, mine.stop]).tolist()
            at, targets = at[first:last] - mine.start, targets[first:last]
            input_ids, places = input_ids[:, mine], places[mine]
        bounds = to_device(np.cumsum([0, *sizes]).astype(np.int32), device)
        described = PackedRow(to_device(places[None], device), bounds, tuple(sizes), group)
    ids, read_at, wanted = (to_device(values, device) for values in (input_ids, at, targets))
    return TokenBatch(ids, read_at, wanted, described, first, actions)


def to_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """Copy `values` to `device`, without waiting for a GPU's queued work, as a copy from pageable memory would."""
    if device.type == "cuda":
        return torch.from_numpy(values).pin_memory().to(device, non_blocking=True)
    return torch.tensor(values, device=device)


def column(exp: Experience, name: str, device: torch.device) -> Tensor:
    """Return a column of the experience, fp32 [A]. Raises KeyError."""
    return to_device(exp.columns[name].astype(np.float32), device)


def optional_column(exp: Experience, name: str, device: torch.device) -> Tensor | None:
    """Return a column of the experience, fp32 [A]; None where it has no such column."""
    return column(exp, name, device) if name in exp.columns else None


def per_action(
    exp: Experience,
    micro: list[list[int]],
    device: torch.device,
    answer: Callable[[TokenBatch], Tensor],
    packed: bool = False,
    group: SequenceGroup | None = None,
) -> F32:
    """Call `answer` on every micro-batch and return its numbers, one for each action, in the order of `exp`, [A].

    `micro`: rows of `exp`; every row must be in exactly one. Under ZeRO-3 each is a collective, so that every rank
    needs as many.
    """
    with torch.no_grad():
        parts = [exp.select(rows) for rows in micro]
        return in_order(exp, micro, [answer(collate(part, device, packed=packed, group=group)) for part in parts])


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
