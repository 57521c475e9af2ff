"""64-bit checksums of bytes: on hosts XXH3, at the speed of memory; on a device a weighted sum, as torch can do it.

Both ends of a transfer have their buffers on the same kind of device, so they need not agree. Changed, shifted and
exchanged words change them; they are no protection against intent.
"""

from __future__ import annotations

from functools import cache

import torch
from xxhash import xxh3_64

_PIECE = 1 << 20  # bytes that are copied and hashed at a time: they stay in a second-level cache in between
_BLOCK = 1 << 15  # words of a block of the sum
_AT_ONCE = 1 << 20  # words that a device takes in one go: more need more memory, less more launches
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 / golden ratio, odd: the multiplier of Fibonacci hashing


def checksum(data: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
    """Compute a checksum of `data` (uint8 [n]; on a device n is a multiple of 8), as an int64 tensor [] on its device.

    With `into` (uint8 [n]) the bytes are copied there on the way, and those that arrived are summed.
    """
    if _is_cpu(data):
        return torch.tensor(host_checksum(data, into))
    return _weighted(data, into)


def host_checksum(data: torch.Tensor, into: torch.Tensor | None = None) -> int:
    """Compute `checksum` of bytes on a host, XXH3, as an int64. The interpreter's lock is free meanwhile."""
    state = xxh3_64()
    if into is None:
        state.update(data.numpy())
    else:
        for low in range(0, data.numel(), _PIECE):
            here = into[low : low + _PIECE]
            here.copy_(data[low : low + _PIECE])
            state.update(here.numpy())
    found = state.intdigest()
    return found - (found >> 63 << 64)


def _weighted(data: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
    """Sum over i, j of x[i, j] * w[j] * v[i] mod 2^64.

    x are the bytes as 64-bit words in blocks of 32768, w and v odd weights: integer arithmetic that depends on
    positions, the same on every device.
    """
    words = data.view(torch.int64)
    copied = words if into is None else into.view(torch.int64)
    block_sums = []
    for low in range(0, words.numel(), _AT_ONCE):
        here = copied[low : low + _AT_ONCE]
        if into is not None:
            here.copy_(words[low : low + _AT_ONCE])
        block_sums.append(_sums(here))
    flat = torch.cat([sums.view(-1) for sums in block_sums]) if block_sums else words
    return (flat * _block_weights(flat.numel(), str(data.device))).sum()


def _sums(words: torch.Tensor) -> torch.Tensor:
    """Sum the blocks in `words` (int64 [n]), weighted: int64 [blocks]."""
    weights = _weights(str(words.device))
    end = words.numel() // _BLOCK * _BLOCK
    whole = (words[:end].view(-1, _BLOCK) * weights).sum(1)
    if end == words.numel():
        return whole
    return torch.cat([whole, (words[end:] * weights[: words.numel() - end]).sum().view(1)])


def _is_cpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


@cache
def _weights(device: str) -> torch.Tensor:
    """Return the weights of the words of a block."""
    return _mixed(_BLOCK).to(device)


@cache
def _block_weights(blocks: int, device: str) -> torch.Tensor:
    """Return the weights of the blocks; 1 for the first."""
    weights = _mixed(blocks + 1)[1:] if blocks else torch.zeros(0, dtype=torch.int64)
    weights[:1] = 1
    return weights.to(device)


def _mixed(count: int) -> torch.Tensor:
    """Make `count` odd words, no two alike."""
    numbers = torch.arange(1, count + 1, dtype=torch.int64) * _GOLDEN
    return (numbers ^ (numbers >> 29)) * _GOLDEN | 1
