"""Compute on the actions of packed tensors: what stands at masked positions reaches neither a result nor a gradient.

Every mask is bool [A]. A masked value, NaN included, is replaced before anything is computed from it, since multiplying
by zero would keep the NaN. Half precision is computed in fp32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # losses call methods of tensors only, so that this room needs no torch
    from torch import Tensor


def actions_only(x: Tensor, mask: Tensor) -> Tensor:
    """Return x [A] in at least fp32, with zeros at masked positions. Raises ValueError where shapes disagree."""
    if x.shape != mask.shape:
        raise ValueError(f"a tensor of shape {tuple(x.shape)} for an action mask of shape {tuple(mask.shape)}")
    x = x.where(mask, 0)
    return x.float() if x.dtype.itemsize < 4 else x


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Add up x [A] over the actions, a scalar; 0 without any, still connected to x."""
    return x.where(mask, 0).sum()


def weighed_sum(x: Tensor, weights: Tensor | None, mask: Tensor) -> Tensor:
    """Add up x * weights over the actions, a scalar; None: every weight is 1."""
    return masked_sum(x if weights is None else x * actions_only(weights, mask), mask)


def step_mean(total: Tensor, denominator: float) -> Tensor:
    """Divide by a number of the whole optimizer step: without any action the mean is 0, not 0 / 0."""
    return total / max(denominator, 1.0)
