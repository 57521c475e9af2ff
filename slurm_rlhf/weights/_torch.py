"""The private and undocumented parts of torch that weight sync uses, written for torch 2.13.0.

_C/_distributed_c10d.so Backend._start_coalescing()
_C/_distributed_c10d.so Backend._end_coalescing()
_C/_distributed_c10d.so Backend._allgather_base(output, input)
storage.py _StorageBase._share_cuda_
storage.py _StorageBase._new_shared_cuda
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import Work


def coalesced(group: Any, begin: Callable[[], None]) -> list[Work]:
    """Start what `begin` asks of an NCCL group as one operation.

    A bare ProcessGroupNCCL is a `Backend`: unlike those of a `ProcessGroup`, the two calls take no argument.
    """
    group._start_coalescing()
    begin()
    work = group._end_coalescing()
    return [work] if work is not None else []


def all_gather(group: Any, whole: torch.Tensor, mine: torch.Tensor) -> Work:
    """Start to send `mine`, a part of `whole` by the rank, to all others."""
    work: Work = group._allgather_base(whole, mine)
    return work


def share_gpu_memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what another process needs to map the tensor's memory: the number of its GPU here, and seven more."""
    fields: tuple[Any, ...] = tensor.untyped_storage()._share_cuda_()
    return fields


def open_gpu_memory(ordinal: int, fields: Sequence[Any]) -> torch.Tensor:
    """Map memory that another process shares, uint8 [n], on the GPU that is number `ordinal` in this process."""
    storage = torch.UntypedStorage._new_shared_cuda(ordinal, *fields[1:])
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
