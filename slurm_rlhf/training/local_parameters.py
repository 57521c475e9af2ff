"""What this rank itself has of a model's parameters, without gathering any of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from slurm_rlhf.training.parameters import is_sharded

Holdings = Mapping[str, tuple[int, Tensor]]


class Rounded(Holdings):
    """Holdings in the precision that the model computes with: under autocast (ZeRO-0, bf16) its weights are fp32.

    One parameter at a time is rounded, when it is asked for.
    """

    def __init__(self, held: Holdings, dtype: torch.dtype) -> None:
        self._held = held
        self._dtype = dtype
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> tuple[int, Tensor]:
        first, elements = self._held[name]
        if self._last is None or self._last[0] != name:
            self._last = (name, elements.to(self._dtype))
        return first, self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


def holdings(model: nn.Module, rank: int) -> Holdings:
    """name -> (index of the first element in the flat parameter, this rank's elements [n]); tied parameters once.

    Under ZeRO-3 rank r holds elements r * s to (r + 1) * s of n, s = ceil(n / ranks), the last ranks fewer or none;
    else every rank holds all. Views where memory allows: valid until the next optimizer step. Not collective.
    """
    held = {}
    for name, parameter in model.named_parameters():
        if is_sharded(parameter):
            shard = parameter.ds_tensor  # DeepSpeed's own, padded to the same size on every rank
            first = rank * shard.ds_numel
            count = max(0, min(shard.ds_numel, parameter.ds_numel - first))
            held[name] = (min(first, parameter.ds_numel), shard.detach().flatten()[:count])
        else:
            held[name] = (0, parameter.detach().reshape(-1))
    return held
