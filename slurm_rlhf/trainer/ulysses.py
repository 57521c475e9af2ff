"""Ranks that compute a packed row together: each has a part of its tokens, and for attention a part of the heads.

Attention needs all tokens of a sequence, and nothing of other heads. So before it the ranks of a group exchange parts
of tokens for parts of heads, and after it they exchange them back; all else in a model works on each token alone.
Source: Jacobs et al., Ulysses (2023), arXiv 2309.14509.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slurm_rlhf.errors import ConfigError
from slurm_rlhf.trainer.distributed import World


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """Knows the ranks that share rows. Its exchanges are collective, their backward passes too."""

    rank: int  # in the group
    size: int
    handle: dist.ProcessGroup

    def tokens(self, width: int) -> slice:
        """Return which tokens of a row of `width`, a multiple of `size`, this rank computes."""
        part = width // self.size
        return slice(self.rank * part, (self.rank + 1) * part)

    def to_heads(self, tensor: Tensor) -> Tensor:
        """Exchange [1, H, T / size, D], this rank's tokens, for [1, H' / size, T, D], its heads of all tokens.

        H' is H, or where `size` does not divide it the least common multiple, each head several times in a row.
        """
        heads = tensor[0].repeat_interleave(math.lcm(tensor.shape[1], self.size) // tensor.shape[1], dim=0)
        parts = _Exchange.apply(heads.unflatten(0, (self.size, -1)), self.handle)
        return parts.transpose(0, 1).flatten(1, 2)[None]

    def to_tokens(self, tensor: Tensor) -> Tensor:
        """Exchange [1, H / size, T, D], this rank's heads of all tokens, for [1, H, T / size, D], its tokens."""
        parts = _Exchange.apply(tensor[0].unflatten(1, (self.size, -1)).transpose(0, 1), self.handle)
        return parts.flatten(0, 1)[None]

    def whole(self, values: Tensor, first: int, count: int) -> Tensor:
        """Put the numbers of all ranks together, [count], given this rank's [n], which begin at `first`.

        Each rank's gradient is that of its own numbers: with the same loss on all ranks, the gradients of parameters
        add up to those of one rank that has computed the row alone.
        """
        return _Whole.apply(values, first, count, self.handle)


def sequence_group(world: World, size: int, timeout_s: float) -> SequenceGroup | None:
    """Form groups of `size` neighbouring ranks, and return this rank's; None for size 1. Collective.

    Raises ConfigError if the ranks are no multiple of it.
    """
    if size == 1:
        return None
    if world.size % size:
        raise ConfigError(
            f"ds.ulysses_size = {size} does not divide the {world.size} ranks of this model: start a multiple of it"
        )
    timeout = timedelta(seconds=timeout_s)
    starts = range(0, world.size, size)
    groups: list[Any] = [dist.new_group([*range(first, first + size)], timeout=timeout) for first in starts]
    return SequenceGroup(world.rank % size, size, groups[world.rank // size])


class _Exchange(torch.autograd.Function):
    """Sends part i of a tensor [size, ...] to rank i, and gets the parts for this rank, by the ranks they are from."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        sent = parts.contiguous()
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=group)
        return got

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Exchange.apply(grad, ctx.group), None


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, first: int, count: int, group: dist.ProcessGroup) -> Tensor:
        ctx.mine = slice(first, first + len(values))
        whole = values.new_zeros(count)
        whole[ctx.mine] = values
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad[ctx.mine], None, None, None
