"""Experience as tensors: packed into one row, or a padded row for each sequence; forward passes without gradients.

Attention in a packed row lets no token see another sequence. 16-bit models on GPUs use torch's flash attention for
variable lengths. Elsewhere neighbours of equal length are computed together, without a mask over the whole row.
transformers' own detection of packed rows is not used: with a mask or a cache it lets sequences see their neighbours,
without a warning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from slurm_rlhf.records import F32, Experience
from slurm_rlhf.trainer._torch import note_kernel
from slurm_rlhf.trainer._transformers import boolean_mask
from slurm_rlhf.trainer.ulysses import SequenceGroup


@dataclass(slots=True)
class PackedRow:
    """Describe a row of T tokens in which N sequences lie end to end."""

    position_ids: Tensor  # int64 [1, T], from 0 on in each sequence; with a group only those of this rank's tokens
    bounds: Tensor  # int32 [N + 1], where the sequences begin, and T
    lengths: tuple[int, ...]  # [N], lengths of the sequences, on the host
    group: SequenceGroup | None = None  # ranks that compute the row together


@dataclass(slots=True)
class TokenBatch:
    """Sequences with A response tokens, in the order of the experience: one packed row, or a row of L tokens each.

    Sequences with a row each are right-padded, and the models are causal: real tokens see no padding, so there is no
    attention mask, and position ids are 0 .. L-1. Ranks that compute a row together have a batch of their own tokens.
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
    """Lay all sequences of `exp` into one row (`packed`), the shortest first, or pad each to the longest.

    The last token of a response predicts nothing: it is in `targets` alone. With `read`, [N], all tokens are in the
    rows, and each sequence has one action: its token at index `read`. `group`: ranks that compute the row together;
    then its sequences lie in the order of `exp`, and a few tokens of padding may follow them.
    Raises ValueError for a response without a prompt before it.
    """
    if np.any((exp.prompt_lens == 0) & (exp.response_lens > 0)):
        index = int(np.flatnonzero((exp.prompt_lens == 0) & (exp.response_lens > 0))[0])
        raise ValueError(f"sequence {index} has a response but no prompt: nothing predicts its first token")
    responses = exp.response_lens.astype(np.int64)
    lengths = exp.prompt_lens + (np.maximum(responses - 1, 0) if read is None else responses)  # the model's tokens
    filled = -int(lengths.sum()) % group.size if group else 0
    width = int(lengths.sum()) + filled if packed else int(lengths.max(initial=1))
    starts: NDArray[np.int64] = np.arange(len(exp), dtype=np.int64) * width
    order = starts.argsort() if group else lengths.argsort(kind="stable")
    if packed:
        starts[order] = lengths[order].cumsum() - lengths[order]
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
        sizes = lengths[order].tolist() + [filled] * (filled > 0)
        places = np.concatenate([np.arange(size) for size in sizes])
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

    `micro`: rows of `exp`; every row must be in exactly one. Under ZeRO-3 every call is collective, so all ranks need
    the same number of micro-batches.
    """
    with torch.no_grad():
        parts = [exp.select(rows) for rows in micro]
        return in_order(exp, micro, [answer(collate(part, device, packed=packed, group=group)) for part in parts])


def in_order(exp: Experience, micro: list[list[int]], answers: list[Tensor]) -> F32:
    """Put the numbers of all micro-batches, one for each action, in the order of `exp`, [A]."""
    offsets = exp.action_offsets
    result = np.full(int(offsets[-1]), np.nan, dtype=np.float32)
    # Copied once, after the last: a copy after each micro-batch would let the device idle before the next one.
    values = torch.cat(answers).cpu().numpy() if answers else result[:0]
    start = 0
    for row in (row for rows in micro for row in rows):
        end = start + int(exp.response_lens[row])
        result[offsets[row] : offsets[row + 1]] = values[start:end]
        start = end
    return result


ATTENTION_NAME = "packed"
"""Attention implementation of transformers that `register` adds."""

ROW_ARGUMENT = "packed_row"
"""Argument of `attention` that transformers' own attention does not have. Compiled layers pass it on unread: a graph
that used its numbers would be compiled again for other lengths."""


def is_exact(computed: Tensor) -> bool:
    """Tell whether `computed` was computed in fp32 throughout."""
    return computed.dtype == torch.float32 and not torch.is_autocast_enabled(computed.device.type)


_LARGEST_HEAD = 256  # dimensions of a head, for flash attention


def register(compiled: bool = False) -> None:
    """Add the attention `ATTENTION_NAME` to transformers; `compiled`: keep it out of the graphs of compiled layers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    # torch.compiler imports the compiler, which takes a second.
    AttentionInterface.register(ATTENTION_NAME, torch.compiler.disable(attention) if compiled else attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _mask)


def _mask(*, q_length: int, kv_length: int, attention_mask: Tensor | None = None, **more: Any) -> Tensor | None:
    """Build the mask for padding or a cache, which batches of `generate` have; None: `attention` itself is causal."""
    if attention_mask is None and q_length == kv_length:
        return None
    sizes = {"q_length": q_length, "kv_length": kv_length}
    return boolean_mask(attention_mask=attention_mask, **more | sizes)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    packed_row: PackedRow | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention; query [B, H, L, D], key and value [B, K, L, D], result [B, L, H, D].

    `packed_row`: the sequences of B = 1 row; None: every row is one sequence. With a group L counts this rank's
    tokens, and the call is collective.
    """
    if torch.is_autocast_enabled(query.device.type):  # under it rotary embeddings return fp32
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    if packed_row is not None and packed_row.group is not None:
        group = packed_row.group
        q, k, v = map(group.to_heads, (query, key, value))
        how: dict[str, Any] = {"scaling": scaling, "sliding_window": sliding_window, "softcap": softcap}
        found, _ = attention(module, q, k, v, None, packed_row=replace(packed_row, group=None), **how)
        return group.to_tokens(found.transpose(1, 2)).transpose(1, 2), None
    if attention_mask is not None:
        return _masked(query, key, value, attention_mask, scaling, softcap).transpose(1, 2), None
    if packed_row is None:
        return _causal(query, key, value, scaling, sliding_window, softcap).transpose(1, 2), None
    half = query.dtype != torch.float32
    if query.is_cuda and half and softcap is None and query.shape[-1] <= _LARGEST_HEAD:
        longest = max(packed_row.lengths)
        return _flash(query, key, value, packed_row.bounds, longest, scaling, sliding_window), None
    counts = [(len([*equal]), length) for length, equal in groupby(packed_row.lengths)]
    sizes, parts = [count * length for count, length in counts], []
    for (count, length), *some in zip(counts, *(each.split(sizes, dim=2) for each in (query, key, value)), strict=True):
        q, k, v = (tensor[0].unflatten(1, (count, length)).transpose(0, 1) for tensor in some)
        parts.append(_causal(q, k, v, scaling, sliding_window, softcap).transpose(0, 1).flatten(1, 2))
    return torch.cat(parts, dim=1).transpose(0, 1)[None], None


def _flash(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scale: float | None, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    note_kernel("packed: flash attention")
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    left = -1 if window is None or window >= longest else window - 1
    gqa = q.shape[1] != k.shape[1]
    found: Tensor = varlen_attn(
        q, k, v, bounds, bounds, longest, longest, scale=scale, window_size=(left, 0), enable_gqa=gqa
    )
    return found[None]


def _causal(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None, softcap: float | None
) -> Tensor:
    length = query.shape[2]
    if softcap is None and (window is None or window >= length):
        gqa = query.shape[1] != key.shape[1]
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=gqa)
    place = torch.arange(length, device=query.device)
    apart = place[:, None] - place
    return _masked(query, key, value, (apart >= 0) & (apart < (window or length)), scale, softcap)


def _masked(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None, softcap: float | None
) -> Tensor:
    """Compute attention to the keys where `mask` is True, bool, [..., L, L']."""
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    if softcap is None:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = (softcap * torch.tanh(scores / softcap)).masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ value
