"""Attention over sequences that lie end to end in one row, where no token sees another sequence.

A 16-bit model on a GPU has torch's flash attention for sequences of unlike lengths. Elsewhere each sequence is computed
by itself, without a mask over the whole row. transformers' own detection of packed rows is not used: with a mask or a
cache it lets sequences see their neighbours, and says nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from slurm_rlhf.trainer._torch import note_kernel
from slurm_rlhf.trainer._transformers import boolean_mask
from slurm_rlhf.trainer.batch import PackedRow

NAME = "packed"
"""Attention implementation of transformers that `register` adds."""

ROW = "packed_row"
"""Argument of `attention` beside those that all attention of transformers knows. Compiled layers hand it on unread: a
graph that had numbers out of it would be made anew for other lengths."""

_LARGEST_HEAD = 256  # dimensions of a head, for flash attention


def register(compiled: bool = False) -> None:
    """Add the attention `NAME` to transformers; `compiled`: layers that are compiled call it as it is."""
    from transformers import AttentionInterface, AttentionMaskInterface

    # torch.compiler imports the compiler, which takes a second.
    AttentionInterface.register(NAME, torch.compiler.disable(attention) if compiled else attention)
    AttentionMaskInterface.register(NAME, _mask)


def _mask(*, q_length: int, kv_length: int, attention_mask: Tensor | None = None, **more: Any) -> Tensor | None:
    """Build the mask of a batch with padding or a cache, as `generate` has them; `attention` itself is causal."""
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

    `packed_row`: the sequences of B = 1 row; None: every row is one sequence. With a group L is of this rank's tokens,
    and the call is collective.
    """
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
    parts, lengths = [], list(packed_row.lengths)
    for q, k, v in zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True):
        parts.append(_causal(q, k, v, scaling, sliding_window, softcap))
    return torch.cat(parts, dim=2).transpose(1, 2), None


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
