"""Whole parameters of a model, whether ZeRO-3 has cut them or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


def is_sharded(parameter: Tensor) -> bool:
    """True when ZeRO-3 has cut the parameter."""
    return hasattr(parameter, "ds_id")


def whole_shape(parameter: Any) -> torch.Size:
    """The parameter's shape; a cut one's own says that it is empty."""
    return getattr(parameter, "ds_shape", parameter.shape)


def full_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, parameter), tied ones once, under their first name.

    Under ZeRO-3 every rank must iterate, and a parameter is whole only until the next one is asked for: one parameter
    at a time is gathered, never the model.
    """
    for name, parameter in model.named_parameters():
        if is_sharded(parameter):
            import deepspeed

            with deepspeed.zero.GatheredParameters([parameter]):
                yield name, parameter.detach()
        else:
            yield name, parameter.detach()


def describe(model: nn.Module, dtype: torch.dtype) -> list[list[Any]]:
    """[[name, shape, dtype], ...] of `full_parameters` in precision `dtype`, written as in "float32"."""
    written = str(dtype).removeprefix("torch.")
    return [[name, list(whole_shape(p)), written] for name, p in model.named_parameters()]
