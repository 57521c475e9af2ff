"""The bytes of one bucket: written on one side, checked and viewed on the other."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from slurm_rlhf.errors import SyncError
from slurm_rlhf.sync.checksum import checksum
from slurm_rlhf.sync.plan import FIXED_HEADER, Bucket, Entry, dtype_name


def fill(
    buffer: torch.Tensor, bucket: Bucket, index: int, version: int, weights: Iterator[tuple[str, torch.Tensor]]
) -> None:
    """Copy the next parameters of `weights` into `buffer` (uint8 [bucket.nbytes]) and head them with their checksums.

    Raises SyncError when they are not those of the plan.
    """
    sums = []
    for entry in bucket.entries:
        name, tensor = next(weights, ("", None))
        if tensor is None:
            raise SyncError(f"the actor's parameters end before {entry.name!r}, which is in the plan")
        found = (name, tuple(tensor.shape), dtype_name(tensor.dtype))
        if found != (entry.name, entry.shape, entry.dtype):
            raise SyncError(
                f"the actor's next parameter is {_text(*found)}, the plan says "
                f"{_text(entry.name, entry.shape, entry.dtype)}; both must come from the same list, in order"
            )
        view(buffer, entry).copy_(tensor.detach())
        sums.append(checksum(_bytes(buffer, entry)))
    header = torch.tensor([version, index], dtype=torch.int64, device=buffer.device)
    _header(buffer, len(sums)).copy_(torch.cat([header, torch.stack(sums)]))


def verify(buffer: torch.Tensor, bucket: Bucket, index: int, version: int) -> None:
    """Compare header and checksums of a bucket that arrived. Raises SyncError naming the parameters that differ."""
    sums = torch.stack([checksum(_bytes(buffer, entry)) for entry in bucket.entries])
    header = _header(buffer, len(bucket.entries)).tolist()
    if header[:FIXED_HEADER] != [version, index]:
        raise SyncError(
            f"expected bucket {index} of policy version {version}, got bucket {header[1]} of version {header[0]}"
        )
    pairs = zip(bucket.entries, header[FIXED_HEADER:], sums.tolist(), strict=True)
    wrong = [entry.name for entry, sent, arrived in pairs if sent != arrived]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise SyncError(
            f"checksum of policy version {version} differs from the sender's in {', '.join(wrong[:5])}{more} "
            f"(bucket {index})"
        )


def view(buffer: torch.Tensor, entry: Entry) -> torch.Tensor:
    """The parameter `entry` as a tensor on the bytes of `buffer`, without a copy."""
    data = buffer[entry.offset : entry.offset + entry.nbytes]
    return data.view(getattr(torch, entry.dtype)).view(entry.shape)


def _header(buffer: torch.Tensor, entries: int) -> torch.Tensor:
    return buffer[: 8 * (FIXED_HEADER + entries)].view(torch.int64)


def _bytes(buffer: torch.Tensor, entry: Entry) -> torch.Tensor:
    """The entry's bytes and the padding up to whole 64-bit lanes, which travels with them."""
    return buffer[entry.offset : entry.offset + -(-entry.nbytes // 8) * 8]


def _text(name: str, shape: tuple[int, ...], dtype: str) -> str:
    return f"{name} {list(shape)} {dtype}" if name else "none"
