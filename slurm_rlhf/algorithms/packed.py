"""Find actions in the packed layout: N responses one after the other in flat columns of A tokens, with gaps.

`offsets[N + 1]` says where each response starts (`Experience.action_offsets`); a response may be empty. Tokens with
`action_mask` False were not chosen by the policy (a tool wrote them) and count in no sum.

Tensors with a mask, bool [A]: values at masked positions reach neither a result nor a gradient. A masked value,
NaN included, is replaced before anything is computed from it, since multiplying by zero would keep the NaN. Half
precision is computed in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from slurm_rlhf.records import Bool

if TYPE_CHECKING:  # losses call methods of tensors only, so that this room needs no torch
    from torch import Tensor

I64 = NDArray[np.int64]
F64 = NDArray[np.float64]


@dataclass(slots=True, frozen=True)
class Actions:
    """Say where the tokens are that the policy chose. C = action_mask.sum()."""

    positions: I64  # [C], index in the flat columns, ascending
    counts: I64  # [N], actions of each response
    ends: I64  # [N], one past each response's last action in `positions`


def find_actions(action_mask: Bool, offsets: NDArray[Any], **columns: ArrayLike) -> Actions:
    """Find the actions of each response.

    `columns` are checked to be as long as the mask, by name, because numpy would broadcast a column of one token
    over the whole batch. Raises ValueError where lengths disagree.
    """
    if action_mask.dtype != np.bool_:
        raise ValueError(f"action_mask must be bool, got {action_mask.dtype}")
    if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(action_mask) or np.any(np.diff(offsets) < 0):
        raise ValueError(f"offsets must rise from 0 to the {len(action_mask)} tokens of action_mask, got {offsets}")
    for name, column in columns.items():
        if np.shape(column) != action_mask.shape:
            raise ValueError(f"{name} has shape {np.shape(column)}, action_mask has {action_mask.shape}")
    positions = np.flatnonzero(action_mask).astype(np.int64)
    ends = np.searchsorted(positions, offsets[1:], side="left").astype(np.int64)
    return Actions(positions, np.diff(ends, prepend=0), ends)


def response_sums(column: ArrayLike, action_mask: Bool, offsets: NDArray[Any]) -> F64:
    """Add up a column over the actions of each response, [N]; 0 for a response without actions.

    column [A]. Example: `response_sums(kl, ...).mean()` is the KL per response that `KLController.update` takes.
    """
    actions = find_actions(action_mask, offsets, column=column)
    values = np.asarray(column, dtype=np.float64)[actions.positions]
    owner = np.repeat(np.arange(len(actions.counts)), actions.counts)
    return np.bincount(owner, weights=values, minlength=len(actions.counts)).astype(np.float64)


def actions_only(x: Tensor, mask: Tensor) -> Tensor:
    """Return x [A] in at least fp32, with zeros at masked positions. Raises ValueError where shapes disagree."""
    if x.shape != mask.shape:
        raise ValueError(f"a tensor of shape {tuple(x.shape)} for an action mask of shape {tuple(mask.shape)}")
    x = x.where(mask, 0)
    return x.float() if x.dtype.itemsize < 4 else x


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Add up x [A] over the actions, a scalar; 0 without any, still connected to x."""
    return x.where(mask, 0).sum()


def weighted_sum(x: Tensor, weights: Tensor | None, mask: Tensor) -> Tensor:
    """Add up x * weights over the actions, a scalar; None: every weight is 1."""
    return masked_sum(x if weights is None else x * actions_only(weights, mask), mask)


def step_mean(total: Tensor, denominator: float) -> Tensor:
    """Divide by a number of the whole optimizer step: without any action the mean is 0, not 0 / 0."""
    return total / max(denominator, 1.0)
