"""The private and undocumented parts of torch that weight sync uses, written for torch 2.13.0.

_C/_distributed_c10d.so ProcessGroupGloo.__init__(store, rank, size, options)
_C/_distributed_c10d.so ProcessGroupGloo.create_device(*, hostname, lazy_init)
_C/_distributed_c10d.so ProcessGroupGloo._Options()
_C/_distributed_c10d.so ProcessGroupGloo._Options._timeout
_C/_distributed_c10d.so ProcessGroupGloo._Options._devices
_C/_distributed_c10d.so Backend._start_coalescing()
_C/_distributed_c10d.so Backend._end_coalescing()
_C/_distributed_c10d.so Backend._allgather_base(output, input)
_C/_distributed_c10d.pyi ProcessGroupNCCL.__init__(self, store, rank, size, options)
_C/_distributed_c10d.pyi Options._timeout
storage.py _StorageBase._share_cuda_
storage.py _StorageBase._new_shared_cuda
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo, Store, Work

from slurm_rlhf.process_groups._torch import prove_all

OWN_ERRORS = {
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
"""What the constructor of ProcessGroupNCCL reads, for groups that handle their own errors. Blocking wait means: no
watchdog thread (says the library itself). One would see what we see, and whatever ASYNC_ERROR_HANDLING says it then has
the process's first group, the training's, dump and end the process. Nothing here calls `wait` before an operation is
over."""


def gloo_group(
    store: Store, rank: int, world: int, address: str, timeout_s: float, lazy: bool = False
) -> ProcessGroupGloo:
    """Build a gloo group outside every WORLD; the others connect to `address` of this node. Raises RuntimeError.

    `lazy`: two ranks connect when they exchange something first, which is for `prove`; else all with all, at once.
    """
    options = ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [ProcessGroupGloo.create_device(hostname=address, lazy_init=lazy)]
    group = ProcessGroupGloo(store, rank, world, options)
    if not lazy:
        prove_all(group, store, rank, world)
    return group


def nccl_group(store: Store, rank: int, world: int, timeout_s: float) -> Any:
    """Build a ProcessGroupNCCL that leaves its errors to its owner. Waiting for its operations blocks the host."""
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    with _environment(OWN_ERRORS):
        return ProcessGroupNCCL(store, rank, world, options)


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


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set these variables for a constructor that reads them; put back what there was."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
