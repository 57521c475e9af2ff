"""A position-dependent checksum in integer arithmetic, the same on every device and cheap on all of them."""

from __future__ import annotations

from functools import cache

import torch

_BLOCK = 1 << 15  # lanes; with as many weights half a megabyte, which a second-level cache holds
_AT_ONCE = 1 << 20  # lanes that an accelerator takes in one go: more need more memory, less more launches
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 / golden ratio, odd: the multiplier of Fibonacci hashing


def checksum(data: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
    """A 64-bit checksum of `data` (uint8 [n], n a multiple of 8), as an int64 tensor [] on its device.

    sum over i, j of x[i, j] * w[j] * v[i] mod 2^64, where x are the bytes as 64-bit lanes in blocks of 32768, w and v
    odd weights. Most parameters, and shards of them, are one block: one dot product on a CPU, at the speed of memory.
    Changed, shifted and exchanged lanes change it; it is no protection against intent.

    With `into` (uint8 [n]) the bytes are copied there on the way, and those that arrived are summed.
    """
    lanes = data.view(torch.int64)
    copied = lanes if into is None else into.view(torch.int64)
    block_sums = []
    step = _BLOCK if _is_cpu(data) else _AT_ONCE
    for low in range(0, lanes.numel(), step):
        here = copied[low : low + step]
        if into is not None:
            here.copy_(lanes[low : low + step])
        block_sums.append(_sums(here))
    if len(block_sums) == 1 and block_sums[0].dim() == 0:
        return block_sums[0]  # the first block's weight is 1
    flat = torch.cat([sums.view(-1) for sums in block_sums]) if block_sums else lanes
    return (flat * _block_weights(flat.numel(), str(data.device))).sum()


def _sums(lanes: torch.Tensor) -> torch.Tensor:
    """Weighted sums of the blocks in `lanes` (int64 [n]): int64 [] on CPUs, for one block, else int64 [blocks]."""
    weights = _weights(str(lanes.device))
    if _is_cpu(lanes):
        return torch.dot(lanes, weights[: lanes.numel()])
    end = lanes.numel() // _BLOCK * _BLOCK
    whole = (lanes[:end].view(-1, _BLOCK) * weights).sum(1)
    if end == lanes.numel():
        return whole
    return torch.cat([whole, (lanes[end:] * weights[: lanes.numel() - end]).sum().view(1)])


def _is_cpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


@cache
def _weights(device: str) -> torch.Tensor:
    """Of the lanes of a block."""
    return _mixed(_BLOCK).to(device)


@cache
def _block_weights(blocks: int, device: str) -> torch.Tensor:
    """Of the blocks; 1 for the first."""
    weights = _mixed(blocks + 1)[1:] if blocks else torch.zeros(0, dtype=torch.int64)
    weights[:1] = 1
    return weights.to(device)


def _mixed(count: int) -> torch.Tensor:
    """`count` odd words, no two alike."""
    numbers = torch.arange(1, count + 1, dtype=torch.int64) * _GOLDEN
    return (numbers ^ (numbers >> 29)) * _GOLDEN | 1
