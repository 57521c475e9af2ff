"""A position-dependent checksum in integer arithmetic, the same on every device and cheap on all of them."""

from __future__ import annotations

from functools import cache

import torch

_WIDTH = 128  # lanes of a row: their sums stay in registers and the first cache, a third faster than long rows
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 / golden ratio, odd: the multiplier of Fibonacci hashing


def checksum(data: torch.Tensor) -> torch.Tensor:
    """A 64-bit checksum of `data` (uint8 [n], n a multiple of 8), as an int64 tensor [] on its device.

    sum over i, j of x[i, j] * (v[i] + w[j]) mod 2^64, where x are the bytes as 64-bit lanes in rows of 128, w are
    mixed and v counting weights. It is taken as two plain sums, over rows and over columns, so it reads the data
    twice and computes little: about the speed of crc32 on a CPU, and of memory on a GPU, where crc32 does not exist.
    Changed, shifted and exchanged lanes change it; it is no protection against intent.
    """
    lanes = data.view(torch.int64)
    weights = _weights(str(data.device))
    rows = lanes.numel() // _WIDTH
    total = (lanes[rows * _WIDTH :] * weights[: lanes.numel() - rows * _WIDTH]).sum()
    if rows:
        body = lanes[: rows * _WIDTH].view(rows, _WIDTH)
        counting = torch.arange(1, rows + 1, device=data.device, dtype=torch.int64)
        total = 31 * total + (body.sum(0) * weights).sum() + (body.sum(1) * counting).sum()
    return total


@cache
def _weights(device: str) -> torch.Tensor:
    mixed = torch.arange(1, _WIDTH + 1, dtype=torch.int64) * _GOLDEN
    return ((mixed ^ (mixed >> 29)) * _GOLDEN | 1).to(device)
