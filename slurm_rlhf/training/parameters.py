"""A model's parameters: whole ones, gathered one at a time, and the elements that this rank has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from slurm_rlhf.training._deepspeed import full_shape, is_sharded, local_shard

LocalParameters = Mapping[str, tuple[int, Tensor]]
"""name -> (index of the first element in the flat parameter, this rank's elements [n]); tied parameters once."""


def full_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, full parameter); tied parameters once, under their first name.

    Under ZeRO-3 every rank must iterate, and a parameter is full only until the next one is asked for: one parameter
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
    """List [name, shape, dtype] of `full_parameters` in precision `dtype`, written as in "float32"."""
    written = str(dtype).removeprefix("torch.")
    return [[name, list(full_shape(p)), written] for name, p in model.named_parameters()]


def local_parameters(model: nn.Module, rank: int) -> LocalParameters:
    """Return what this rank has of each parameter, without gathering any. Not collective.

    Under ZeRO-3 rank r has elements r * s to (r + 1) * s of n, s = ceil(n / ranks), the last ranks fewer or none; else
    every rank has all. Views where memory allows: valid until the next optimizer step.
    """
    return {
        name: local_shard(parameter, rank) if is_sharded(parameter) else (0, parameter.detach().reshape(-1))
        for name, parameter in model.named_parameters()
    }


class Rounded(LocalParameters):
    """Local parameters in the precision that the model computes with: under autocast (ZeRO-0, bf16) they are fp32.

    One parameter at a time is rounded, when it is asked for.
    """

    def __init__(self, parameters: LocalParameters, dtype: torch.dtype) -> None:
        self._parameters = parameters
        self._dtype = dtype
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> tuple[int, Tensor]:
        first, elements = self._parameters[name]
        if self._last is None or self._last[0] != name:
            self._last = (name, elements.to(self._dtype))
        return first, self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)
